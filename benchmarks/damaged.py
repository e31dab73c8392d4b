"""Step times before a fault of a real cable, while it lasts, and after it has healed, beside the theory.

    python benchmarks/damaged.py --fault cut:4/0 --fault switch:1/0    # needs root: the fabric is emulated

One job a fault, on an emulated fabric: steps on the healthy fabric; the fault, for a few seconds; steps until
the parts are in use again, and some more. Medians, without the first step of every view, over the schedule's
time on the goodput of the NICs.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import bml
from bml import fabric as emulated
from bml.fabric import GOODPUT, EmulatedFabric
from bml.lab.commands.quantities import parse_bytes
from bml.schedule import Schedules

Row = dict[str, Any]


def training(n_elements: int, n_steps: int) -> Any:
    """So many steps on the healthy fabric, any number while it is damaged, and so many when it is whole."""

    def train(session: bml.Session) -> None:
        x = session.empty(n_elements)
        x[:] = 1
        damaged, whole = False, 0
        while not damaged or whole < n_steps:
            x[-1] = bool(session.view.failures)
            total = session.allreduce(x)
            assert (total[:-1] == len(session.contributors)).all()
            damaged, whole = damaged or bool(total[-1]), 0 if total[-1] else whole + 1

    return train


def measure(network: EmulatedFabric, fault: str, nbytes: int, n_steps: int, lasts_s: float) -> list[Row]:
    """Rows `before`, `damaged`, `healed`: median_s, theory_s, steps, failures."""
    result = bml.launch(
        training(nbytes // 4, n_steps),
        network.fabric.name,
        launcher="processes",
        emulated=network.name,
        faults=[f"{fault}@step={n_steps + 1},for={lasts_s}s"],
        prints=False,
    )
    times = [metrics["commit_at_s"] for metrics in result.report["metrics"].values()]
    took_s = [later - earlier for earlier, later in pairwise(np.max(times, axis=0))]  # [i]: step i + 2
    views = result.report["views"]
    ends = [*(view["commit"] for view in views[1:]), len(took_s) + 1]
    # Not the step that a view begins in: it was interrupted.
    parts = [
        (tuple(view["failures"]), took_s[view["commit"] : max(view["commit"], end - 1)])
        for view, end in zip(views, ends, strict=True)
    ]
    damaged = max((part for part in parts if part[0]), key=lambda part: len(part[1]))
    rows = zip(("before", "damaged", "healed"), (parts[0], damaged, parts[-1]), strict=True)
    goodput = network.condition.rate_bit / 8 * GOODPUT
    return [
        {
            "when": when,
            "fault": fault,
            "failures": failures,
            "steps": len(steps),
            "median_s": statistics.median(steps),
            "theory_s": theory_s(network, failures, nbytes, goodput),
        }
        for when, (failures, steps) in rows
    ]


def theory_s(network: EmulatedFabric, failures: tuple[str, ...], nbytes: int, goodput: float) -> float:
    """The time of the schedule that servers take for such a step, in seconds."""
    made = Schedules(network.fabric.without(*failures)).for_nbytes(nbytes)
    return float(made.gst()) * nbytes / goodput


@click.command()
@click.option("--fabric", "shape", default="bcube:3x2", show_default=True)
@click.option("--rate", default="100mbit", show_default=True)
@click.option("--size", default="8MiB", show_default=True)
@click.option("--fault", "faults", multiple=True, default=("cut:4/0", "switch:1/0"), show_default=True)
@click.option("--steps", default=12, show_default=True, help="Before, and after.")
@click.option(
    "--lasts", "lasts_s", default=10.0, show_default=True, help="How long the fault lasts, in seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    shape: str, rate: str, size: str, faults: tuple[str, ...], steps: int, lasts_s: float, as_json: bool
) -> None:
    """Measure steps before, during and after faults of cables."""
    network = emulated.up(shape, rate, name="damaged")
    try:
        rows = [row for fault in faults for row in measure(network, fault, parse_bytes(size), steps, lasts_s)]
    finally:
        network.down()
    if as_json:
        click.echo(json.dumps({"fabric": shape, "rate": rate, "size": size, "rows": rows}))
        return
    table = Table("fault", "when", "steps", "median", "theory", "ratio")
    for row in rows:
        times = [f"{row[name] * 1000:.0f} ms" for name in ("median_s", "theory_s")]
        ratio = f"{row['median_s'] / row['theory_s']:.3f}"
        table.add_row(row["fault"], row["when"], str(row["steps"]), *times, ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
