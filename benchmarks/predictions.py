"""Step times and remaining times that a job predicted, beside those that it measured.

    python benchmarks/predictions.py    # needs root: the fabric is emulated

One job a case, on an emulated fabric: steps on the healthy fabric, a fault, and steps while it lasts. A row
for each view that had a prediction and enough steps; the prediction was made before these steps.
"""

from __future__ import annotations

import json
import time
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import bml
from bml import fabric as emulated
from bml.fabric import EmulatedFabric
from bml.lab.commands.quantities import parse_bytes

LEAST_STEPS = 5
LOOK_S = 0.5
CASES = {
    "server": ("kill:4", "no"),
    "link": ("cut:4/0", "no"),
    "switch": ("switch:0/1", "no"),
    "slow NIC": ("slow:4/0,rate={tenth}", "no"),
    "server, computation before": ("kill:4", "before"),
    "link, computation before": ("cut:4/0", "before"),
    "link, computation beside": ("cut:4/0", "beside"),
    "switch, computation beside": ("switch:0/1", "beside"),
}
Row = dict[str, Any]


def training(n_elements: int, n_steps: int, computes: str, compute_s: float) -> Any:
    """Steps with numpy's multiplication of matrices before them, beside them, or none."""

    def train(session: bml.Session) -> None:
        x, a = session.empty(n_elements), np.ones((120, 120), "f4")
        x[:] = 1

        def compute(seconds: float) -> None:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                a @ a
                time.sleep(0.02)  # nine servers share the cores of one machine

        for _ in session.steps(n_steps):
            if computes == "before":
                compute(compute_s)
            if computes != "beside":
                session.allreduce(x)
                continue
            compute(compute_s / 4)
            pending = session.allreduce_async(x)
            compute(compute_s)
            pending.wait()

    return train


def measure(
    network: EmulatedFabric, name: str, nbytes: int, n_steps: int, compute_s: float
) -> tuple[list[Row], list[Row]]:
    """The views of one job, and the remaining times that it said while it ran."""
    fault, computes = CASES[name]
    part, comma, settings = fault.partition(",")
    tenth = f"{network.condition.rate_bit // 10_000}kbit"
    said: list[tuple[float, dict[str, Any]]] = []
    train = training(nbytes // 4, n_steps, computes, compute_s)
    with bml.start(
        train,
        network.fabric.name,
        launcher="processes",
        emulated=network.name,
        faults=[f"{part}@step={n_steps // 5}{comma}{settings.format(tenth=tenth)}"],
        prints=False,
    ) as job:
        while job.running:
            rest = job.status().get("remaining")
            if rest and (not said or said[-1][1]["done"] != rest["done"]):
                said.append((time.monotonic(), rest))
            time.sleep(LOOK_S)
        ended_s = time.monotonic()
        result = job.wait()
    views = result.report["views"]
    ends = [*(view["commit"] for view in views[1:]), result.report["steps"]]
    rows = [
        {
            "case": name,
            "view": view["epoch"],
            "failures": view["failures"],
            "slow": view["slow"],
            "steps": end - view["commit"] - 1,
            "predicted_s": view["predicted_s"],
            "measured_s": view["measured_s"],
            "ratio": view["predicted_s"] / view["measured_s"],
        }
        for view, end in zip(views, ends, strict=True)
        if view["predicted_s"] and view["measured_s"] and end - view["commit"] > LEAST_STEPS
    ]
    return rows, [
        {
            "case": name,
            "done": rest["done"],
            "said_s": rest["seconds"],
            "left_s": ended_s - at_s,
            "inside": rest["low_s"] <= ended_s - at_s <= rest["high_s"],
        }
        for at_s, rest in said
        if 0.25 <= rest["done"] < 0.95
    ]


@click.command()
@click.option("--fabric", "shape", default="bcube:3x2", show_default=True)
@click.option("--rate", default="50mbit", show_default=True)
@click.option("--size", default="4MiB", show_default=True)
@click.option("--case", "cases", multiple=True, type=click.Choice(tuple(CASES)), help="[default: all]")
@click.option("--steps", default=50, show_default=True, help="Of a job; the fault comes after a fifth.")
@click.option("--compute", "compute_s", default=0.5, show_default=True, help="Seconds of computation a step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    shape: str, rate: str, size: str, cases: tuple[str, ...], steps: int, compute_s: float, as_json: bool
) -> None:
    """Compare predictions with what came."""
    network = emulated.up(shape, rate, name="predict")
    try:
        measured = [measure(network, case, parse_bytes(size), steps, compute_s) for case in cases or CASES]
    finally:
        network.down()
    views, rests = ([row for each in measured for row in each[i]] for i in (0, 1))
    if as_json:
        click.echo(json.dumps({"views": views, "remaining": rests}))
        return
    console = Console()
    table = Table("case", "view", "broken or slow", "steps", "predicted", "measured", "ratio")
    for row in views:
        times = [f"{row[name] * 1000:.0f} ms" for name in ("predicted_s", "measured_s")]
        damage = ", ".join([*row["failures"], *row["slow"]]) or "nothing"
        table.add_row(row["case"], str(row["view"]), damage, str(row["steps"]), *times, f"{row['ratio']:.3f}")
    console.print(table)
    table = Table("case", "done", "said", "left", "ratio", "inside")
    for row in rests:
        ratio = f"{row['said_s'] / row['left_s']:.3f}"
        times = [f"{row[name]:.1f} s" for name in ("said_s", "left_s")]
        table.add_row(row["case"], f"{row['done']:.0%}", *times, ratio, "yes" if row["inside"] else "no")
    console.print(table)


if __name__ == "__main__":
    main()
