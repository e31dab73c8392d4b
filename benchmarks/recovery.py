"""How long a fault keeps a job from committing: many short jobs on local processes, one fault each.

    python benchmarks/recovery.py --trials 50

Measured on every survivor as the longest time between two commits, which contains the fault: an upper
bound of fault -> next commit, as it counts the step that was under way too. The step itself takes a few
milliseconds. Prints a row per kind of fault: median, p99 and maximum over the trials, slowest survivor.
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

KINDS = ("kill", "blackhole", "switch", "freeze", "coordinator")
STEPS, LENGTH, PAUSE_S = 60, 10_000, 0.02


def train(session: bml.Session) -> None:
    import time

    for _ in range(STEPS):
        time.sleep(PAUSE_S)  # stands for computing a gradient, and keeps the machine's two cores free
        session.allreduce(np.ones(LENGTH, np.float32))


def fault(kind: str, rng: random.Random) -> str:
    step = rng.randrange(10, STEPS - 10)
    target = {
        "kill": f":{rng.randrange(9)}",
        "freeze": f":{rng.randrange(9)}",
        "blackhole": f":{rng.randrange(9)}/{rng.randrange(2)}",
        "switch": f":{rng.randrange(2)}/{rng.randrange(3)}",
        "coordinator": "",
    }[kind]
    return f"{kind}{target}@step={step}"


def trial(kind: str, rng: random.Random) -> float:
    text = fault(kind, rng)
    result = bml.launch(train, fabric="bcube:3x2", launcher="processes", transport="tcp", faults=[text])
    assert result.report["steps"] == STEPS, text
    return max(metrics["step_max_s"] for metrics in result.report["metrics"].values()) - PAUSE_S


@click.command()
@click.option("--trials", default=50, show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(trials: int, kinds: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Time from fault to the next commit, nine servers on this machine."""
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        rng = random.Random(f"{seed} {kind}")
        times = sorted(trial(kind, rng) for _ in track(range(trials), kind, console=Console(stderr=True)))
        p99 = times[min(len(times) - 1, round(0.99 * len(times)))]
        median = statistics.median(times)
        rows.append({"fault": kind, "trials": trials, "median_s": median, "p99_s": p99, "max_s": times[-1]})
    if as_json:
        click.echo(json.dumps({"rows": rows}))
        return
    table = Table("fault", "trials", "median", "p99", "max", title="fault to next commit, 9 local servers")
    for row in rows:
        times_ms = [f"{row[key] * 1000:.0f} ms" for key in ("median_s", "p99_s", "max_s")]
        table.add_row(row["fault"], str(trials), *times_ms)
    Console().print(table)


if __name__ == "__main__":
    main()
