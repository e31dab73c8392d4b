"""How much steps and computation slow each other when they go on at the same time.

    python benchmarks/overlap.py --size 4MiB
    python benchmarks/overlap.py --size 4MiB --rate 200mbit        # on an emulated fabric; needs root

On every server steps are begun with `allreduce_async`, and the training thread computes until they are over:
in pure Python, which holds the interpreter's lock; with numpy's matmul, which lets go of it; or with torch.
Compared with steps alone and computation alone. `--switch-ms` sets how long a thread keeps the interpreter's
lock while others want it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import bml
from bml import fabric as emulated
from bml.lab.commands.quantities import parse_bytes

KINDS = ("python", "matmul", "torch")


def computation(kind: str) -> Callable[[], None]:
    """About a millisecond or less of it."""
    if kind == "python":

        def spin() -> None:
            total = 0
            for number in range(10_000):
                total += number * number

        return spin
    if kind == "matmul":
        a = np.ones((160, 160), np.float32)
        out = np.empty_like(a)
        return lambda: void(np.matmul(a, a, out=out))
    import torch

    torch.set_num_threads(1)
    b = torch.ones((160, 160))
    return lambda: void(torch.mm(b, b))


def void(_: Any) -> None:
    """Drop a value."""


def training(kind: str, n_elements: int, n_steps: int, turns: int, switch_s: float | None) -> Any:
    def train(session: bml.Session) -> dict[str, list[float]]:
        if switch_s is not None:
            sys.setswitchinterval(switch_s)
        work = computation(kind)
        x = session.empty(n_elements)
        x[:] = 1
        alone, beside, rate_alone, rate_beside = [], [], [], []

        def compute(until: Callable[[], bool]) -> tuple[float, float]:
            """(seconds, pieces of work a second)."""
            begun_s, pieces = time.monotonic(), 0
            while not until():
                work()
                pieces += 1
            took_s = time.monotonic() - begun_s
            return took_s, pieces / took_s

        for _ in range(turns):
            session.barrier()
            begun_s = time.monotonic()
            for handle in [session.allreduce_async(x) for _ in range(n_steps)]:
                handle.wait()
            alone.append((time.monotonic() - begun_s) / n_steps)
            session.barrier()
            end_s = time.monotonic() + n_steps * alone[-1]
            rate_alone.append(compute(lambda end_s=end_s: time.monotonic() >= end_s)[1])
            session.barrier()
            handles = [session.allreduce_async(x) for _ in range(n_steps)]
            took_s, rate = compute(lambda handles=handles: handles[-1].done)
            beside.append(took_s / n_steps)
            rate_beside.append(rate)
            for handle in handles:
                assert (handle.wait() == len(session.contributors)).all()
        return {"alone": alone, "beside": beside, "rate_alone": rate_alone, "rate_beside": rate_beside}

    return train


def measure(kind: str, shape: str, settings: dict[str, Any], *training_settings: Any) -> dict[str, Any]:
    result = bml.launch(
        training(kind, *training_settings), shape, launcher="processes", prints=False, **settings
    )
    each = {name: [m for value in result.values.values() for m in value[name]] for name in result.value}
    medians = {name: statistics.median(values) for name, values in each.items()}
    return {
        "computation": kind,
        "step_alone_s": medians["alone"],
        "step_beside_s": medians["beside"],
        "step": medians["beside"] / medians["alone"],
        "computation_speed": medians["rate_beside"] / medians["rate_alone"],
    }


@click.command()
@click.option("--fabric", "shape", default="bcube:2x1", show_default=True)
@click.option("--size", default="4MiB", show_default=True)
@click.option("--rate", help="Emulate the fabric, at this rate of every NIC.")
@click.option("--steps", default=20, show_default=True)
@click.option("--turns", default=5, show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS)
@click.option("--transport", default="tcp", show_default=True)
@click.option("--switch-ms", type=float, help="Set sys.setswitchinterval; a job sets 0.1, Python 5.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    shape: str,
    size: str,
    rate: str | None,
    steps: int,
    turns: int,
    kinds: tuple[str, ...],
    transport: str,
    switch_ms: float | None,
    as_json: bool,
) -> None:
    """Measure steps beside computation."""
    switch_s = None if switch_ms is None else switch_ms / 1000
    with ExitStack() as stack:
        settings: dict[str, Any] = {"transport": transport}
        if rate is not None:
            network = emulated.up(shape, rate, name="overlap")
            stack.callback(network.down)
            settings["emulated"] = network.name
        n_elements = parse_bytes(size) // 4
        rows = [measure(kind, shape, settings, n_elements, steps, turns, switch_s) for kind in kinds]
    if as_json:
        click.echo(json.dumps({"fabric": shape, "size": size, "rate": rate, "rows": rows}))
        return
    table = Table("computation", "step alone", "beside it", "ratio", "computation keeps")
    for row in rows:
        times = [f"{row[name] * 1000:.2f} ms" for name in ("step_alone_s", "step_beside_s")]
        share = f"{row['computation_speed']:.0%}"
        table.add_row(row["computation"], *times, f"{row['step']:.2f}", share)
    Console().print(table)


if __name__ == "__main__":
    main()
