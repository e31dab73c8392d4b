"""Whether healthy servers are taken for dead on a machine that is busy with something else.

    python benchmarks/false_suspicion.py --minutes 10

Nine servers, as processes, sum a vector of 1 MiB in step after step, at the default `detect_s`, while other
processes keep every core busy. No fault is injected: every view but the first is a false suspicion.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from typing import Any

import click
import numpy as np

import bml

FABRIC, LENGTH = "bcube:3x2", 1 << 18


def spin() -> None:
    while True:
        pass


def training(seconds: float) -> Any:
    def train(session: bml.Session) -> int:
        gradient = session.empty(LENGTH)
        gradient[:] = 1.0
        end = time.monotonic() + seconds
        steps = 0
        over = np.zeros(1)
        while not over[0]:
            session.allreduce(gradient)
            steps += 1
            over = session.allreduce(np.array([float(time.monotonic() > end)]))
        return steps

    return train


@click.command()
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(minutes: float, as_json: bool) -> None:
    """Count false suspicions."""
    cores = len(os.sched_getaffinity(0))
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(cores)]
    for each in busy:
        each.start()
    try:
        result = bml.launch(training(minutes * 60), FABRIC, launcher="processes", transport="tcp")
    finally:
        for each in busy:
            each.kill()
    views = result.report["views"]
    said = {
        "minutes": minutes,
        "cores": cores,
        "busy_processes": cores,
        "steps": result.value,
        "views": len(views),
        "evicted": result.report["dead"],
        "reasons": [view["reason"] for view in views[1:]],
    }
    click.echo(json.dumps(said, indent=None if as_json else 1))


if __name__ == "__main__":
    main()
