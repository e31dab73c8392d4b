"""How long a step takes in a job of its own, without peers: to compare two versions of this project.

    python benchmarks/steps.py --fabric bcube:2x1 --size 1MiB --shared
    cd ../other-checkout && PYTHONPATH=. python benchmarks/steps.py --fabric bcube:2x1 --size 1MiB --shared

Take turns between the versions, several jobs each: where the kernel puts the servers differs from job to job.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import click
import numpy as np

import bml
from bml.lab.commands.quantities import parse_bytes

COLLECTIVES = ("allreduce", "broadcast", "all_gather", "all_to_all")
"""Those of which every server brings an array of the size, or one that is split into equal parts."""
_WARM_UP = 20
_LARGE_NBYTES = 4 << 20


def training(nbytes: int, steps: int, collective: str, shared: bool) -> Callable[[bml.Session], list[float]]:
    """Steps to which each server brings so many bytes; returns how long each took, in seconds."""

    def train(session: bml.Session) -> list[float]:
        import time

        vector = session.empty(nbytes // 4)
        vector[:] = 1
        call = getattr(session, collective)
        options = {"shared": True} if shared else {}
        given = np.array_split(vector, session.n_servers) if collective == "all_to_all" else vector
        times_s = []
        for _ in range(_WARM_UP + steps):
            begun_s = time.perf_counter()
            result = call(given, **options)
            times_s.append(time.perf_counter() - begun_s)
            del result  # its memory is used again
        return times_s[_WARM_UP:]

    return train


@click.command()
@click.option("--fabric", default="bcube:2x1", show_default=True)
@click.option("--size", default="1MiB", show_default=True)
@click.option("--transport", default="shm", show_default=True)
@click.option("--shared", is_flag=True, help="Read results of allreduce in place.")
@click.option("--collective", type=click.Choice(COLLECTIVES), default=COLLECTIVES[0], show_default=True)
@click.option("--steps", type=int, help="Default: 3000, or 600 of 4 MiB and more.")
@click.option("--json", "as_json", is_flag=True)
def main(
    fabric: str,
    size: str,
    transport: str,
    shared: bool,
    collective: str,
    steps: int | None,
    as_json: bool,
) -> None:
    """Time the steps of server 0 in a job of plain processes on this machine."""
    nbytes = parse_bytes(size)
    steps = steps or (3000 if nbytes < _LARGE_NBYTES else 600)
    train = training(nbytes, steps, collective, shared)
    times_s = bml.launch(train, fabric, launcher="processes", transport=transport).value
    median_s, fast_s = statistics.median(times_s), statistics.quantiles(times_s, n=5)[0]
    if as_json:
        click.echo(json.dumps({"fabric": fabric, "nbytes": nbytes, "median_s": median_s, "fast_s": fast_s}))
        return
    times = f"median {median_s * 1e6:.1f} µs, a fifth below {fast_s * 1e6:.1f} µs"
    click.echo(f"{fabric}, {collective} of {size}: {times}")


if __name__ == "__main__":
    main()
