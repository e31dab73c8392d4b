"""How long a fault keeps a job from committing: many short jobs on local processes, one fault each.

    python benchmarks/recovery.py --trials 50
    python benchmarks/recovery.py --trials 10 --kind stopped-coordinator --launcher ray --fabric bcube:2x2

Measured on every survivor as the longest time between two commits, which contains the fault: an upper
bound of fault -> next commit, as it counts the step that was under way too. The step itself takes a few
milliseconds. Prints a row per kind of fault: median, p99 and maximum over the trials, slowest survivor.
`stopped-coordinator`: it stands still for a minute, and a server is killed two steps after it has begun to.
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import bml
from bml.cluster.launcher.launch import LAUNCHERS
from bml.topology import Fabric, parse

KINDS = ("kill", "blackhole", "switch", "freeze", "coordinator", "stopped-coordinator")
STEPS, LENGTH, PAUSE_S = 60, 10_000, 0.02


def train(session: bml.Session) -> None:
    import time

    for _ in range(STEPS):
        time.sleep(PAUSE_S)  # stands for computing a gradient, and keeps the machine's two cores free
        session.allreduce(np.ones(LENGTH, np.float32))


def faults(kind: str, fabric: Fabric, rng: random.Random) -> list[str]:
    step, server = rng.randrange(10, STEPS - 10), rng.randrange(fabric.n_servers)
    level = rng.randrange(fabric.levels)
    group = rng.randrange(len(fabric.switches) // fabric.levels)
    return {
        "kill": [f"kill:{server}@step={step}"],
        "freeze": [f"freeze:{server}@step={step}"],
        "blackhole": [f"blackhole:{server}/{level}@step={step}"],
        "switch": [f"switch:{level}/{group}@step={step}"],
        "coordinator": [f"coordinator@step={step}"],
        "stopped-coordinator": [f"freeze:coordinator@step={step},for=60s", f"kill:{server}@step={step + 2}"],
    }[kind]


def trial(kind: str, fabric: str, launcher: str, rng: random.Random) -> float:
    texts = faults(kind, parse(fabric), rng)
    result = bml.launch(train, fabric=fabric, launcher=launcher, transport="tcp", faults=texts)
    assert result.report["steps"] == STEPS, texts
    return max(metrics["step_max_s"] for metrics in result.report["metrics"].values()) - PAUSE_S


@click.command()
@click.option("--trials", default=50, show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS)
@click.option("--fabric", default="bcube:3x2", show_default=True)
@click.option("--launcher", type=click.Choice(LAUNCHERS), default="processes", show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(trials: int, kinds: tuple[str, ...], fabric: str, launcher: str, seed: int, as_json: bool) -> None:
    """Time from fault to the next commit, all servers on this machine."""
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        rng = random.Random(f"{seed} {kind}")
        shown = track(range(trials), kind, console=Console(stderr=True))
        times = sorted(trial(kind, fabric, launcher, rng) for _ in shown)
        p99 = times[min(len(times) - 1, round(0.99 * len(times)))]
        median = statistics.median(times)
        row = {"fault": kind, "trials": trials, "median_s": median, "p99_s": p99, "max_s": times[-1]}
        rows.append(row | {"times_s": times})
    if as_json:
        click.echo(json.dumps({"rows": rows}))
        return
    table = Table(
        "fault", "trials", "median", "p99", "max", title=f"fault to next commit, {fabric}, {launcher}"
    )
    for row in rows:
        times_ms = [f"{row[key] * 1000:.0f} ms" for key in ("median_s", "p99_s", "max_s")]
        table.add_row(row["fault"], str(trials), *times_ms)
    Console().print(table)


if __name__ == "__main__":
    main()
