"""How much memory and how many descriptors servers take when every step has a vector of another size.

    python benchmarks/memory.py --transport shm --largest 128MiB --steps 1000
    python benchmarks/memory.py --transport auto --algorithm bml --largest 128MiB     # zero-copy payloads

What is shared is divided among the processes that have it mapped (Pss of /proc/self/smaps_rollup), looked at
all the time by a thread of each server; what a server takes before the first step is subtracted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import bml
from bml.lab.commands.quantities import parse_bytes

EARLY = 20
"""How many steps at the beginning are shown apart: memory that grows with the steps is less there."""


def stretches(per_step: npt.NDArray[np.int64]) -> list[int]:
    """The most within the first steps, and within each quarter of all steps."""
    edges = [len(per_step) * quarter // 4 for quarter in range(5)]
    parts = [per_step[:EARLY], *(per_step[start:end] for start, end in pairwise(edges))]
    return [int(part.max(initial=0)) for part in parts]


def training(largest: int, steps: int, seed: int, foreign: bool) -> Callable[[bml.Session], dict[str, Any]]:
    """One vector and one result at a time; returns, per step, bytes within and after it, and descriptors."""

    def train(session: bml.Session) -> dict[str, Any]:
        import os
        import random
        import threading
        from pathlib import Path

        def taken() -> int:
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

        chance = random.Random(seed)
        session.allreduce(np.ones(1000))
        # Filled before anything is counted: a record per step would look like a leak.
        within, after, descriptors = (np.full(steps, -1) for _ in range(3))
        before, over = taken(), threading.Event()
        step = 0

        def watch() -> None:
            while not over.wait(0.02):
                within[step] = max(within[step], taken() - before)

        watching = threading.Thread(target=watch)
        watching.start()
        for step in range(steps):
            n = chance.randint(1, largest // 4)
            x = np.empty(n, "float32") if foreign else session.empty(n, "float32")
            x[:] = step + session.server
            total = session.allreduce(x)
            n_servers = len(session.contributors)
            assert total[0] == total[-1] == n_servers * step + sum(session.contributors)
            del x, total
            descriptors[step] = len(os.listdir("/proc/self/fd"))
            after[step] = taken() - before
        over.set()
        watching.join()
        return {"in_steps": np.maximum(within, after), "between": after, "fds": descriptors}

    return train


@click.command()
@click.option("--fabric", default="bcube:2x2", show_default=True)
@click.option("--transport", default="shm", show_default=True)
@click.option("--algorithm", default=None, help="With the transport auto: payloads are sent without a copy.")
@click.option("--largest", default="128MiB", show_default=True)
@click.option("--steps", default=1000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--foreign", is_flag=True, help="Contribute arrays that are not of session.empty.")
def main(
    fabric: str, transport: str, algorithm: str | None, largest: str, steps: int, seed: int, foreign: bool
) -> None:
    """Print what each server took, in vectors of the largest size, and its descriptors: the most within
    the first 20 steps, and within each quarter of the steps."""
    nbytes = parse_bytes(largest)
    train = training(nbytes, steps, seed, foreign)
    options: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
    result = bml.launch(train, fabric, launcher="processes", transport=transport, **options)
    for server, took in sorted(result.values.items()):
        line = {
            "server": server,
            "in_steps": [round(most / nbytes, 2) for most in stretches(took["in_steps"])],
            "between": [round(most / nbytes, 2) for most in stretches(took["between"])],
            "fds": stretches(took["fds"]),
        }
        click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
