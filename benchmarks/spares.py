"""How soon a spare contributes in the place of a server that was killed.

    python benchmarks/spares.py --launcher ray --state-mib 64

Four servers on this machine sum a short vector in step after step. One after the other is sent SIGKILL, and
each is replaced by a spare. The times are those of server 0, which is never killed: from the signal to the
view without the dead server, to the view in which the spare learns, and to the one in which it contributes.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

import bml

FABRIC, VICTIMS = "bcube:2x2", (3, 2, 1)
PAUSE_S, LOOK_S, WITHIN_S = 0.005, 0.01, 120.0
PHASES = ("without it", "learns", "contributes")


Seen = list[tuple[float, tuple[int, ...]]]
"""The times, by time.monotonic, at which a server saw other contributors."""


def training(state_nbytes: int, stop: Path) -> Callable[[bml.Session], Seen]:
    """Return a function that steps until there is a file `stop`, and returns what it has seen."""

    def train(session: bml.Session) -> Seen:
        params = session.empty(state_nbytes // 4)
        params[:] = 0
        session.state(params=params)
        seen: Seen = []
        for _ in session.steps(10**9):
            time.sleep(PAUSE_S)  # stands for computing a gradient
            ends = session.allreduce(np.array([stop.exists()], "i4"), op="max")
            params[:8] += 1  # joiners get only what has changed once
            if not seen or seen[-1][1] != tuple(session.contributors):
                seen.append((time.monotonic(), tuple(session.contributors)))
            if ends[0]:
                break
        return seen

    return train


def until(what: Callable[[], Any], job: bml.Job) -> Any:
    """Return the first true value of a function."""
    deadline = time.monotonic() + WITHIN_S
    while not (found := what()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {WITHIN_S:.0f} s; the job is {job.status()}")
        time.sleep(LOOK_S)
    return found


def is_whole(job: bml.Job, incarnation: int) -> bool:
    """Whether all servers contribute, and as many have joined."""
    now = job.status()
    joined = max(now.get("joined", {}).values(), default=0)
    return len(now.get("members", ())) == 4 and not now["learners"] and joined == incarnation


def kill(job: bml.Job, server: int) -> float:
    """Kill a server; return when, by time.monotonic."""
    process = until(lambda: job.status()["servers"][server].get("process"), job)
    at = time.monotonic()
    os.kill(process, signal.SIGKILL)
    return at


def phases(server: int, killed_at: float, seen: Seen, views: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from the signal to each of PHASES, of the `views` from the first without it on."""
    missed_at = next(at for at, there in seen if at > killed_at and server not in there)
    return [missed_at - killed_at + each["at_s"] - views[0]["at_s"] for each in views[:3]]


def trial(launcher: str, transport: str, state_nbytes: int) -> list[list[float]]:
    """Return the phases of each replacement in one job."""
    with tempfile.TemporaryDirectory(prefix="spares-") as folder:
        stop = Path(folder) / "stop"
        train = training(state_nbytes, stop)
        with bml.start(
            train, FABRIC, launcher=launcher, transport=transport, start_s=WITHIN_S, spares=len(VICTIMS)
        ) as job:
            until(lambda: job.status()["spares"] == len(VICTIMS), job)
            until(lambda: job.status()["servers"][0].get("step", 0) >= 20, job)
            killed = []
            for number, server in enumerate(VICTIMS):
                killed.append(kill(job, server))
                until(lambda number=number: is_whole(job, number + 1), job)
            stop.touch()
            result = job.wait(WITHIN_S)
    views, seen = result.report["views"][1:], result.values[0]
    each = zip(VICTIMS, killed, strict=True)
    return [phases(*one, seen, views[3 * number :]) for number, one in enumerate(each)]


@click.command()
@click.option("--launcher", type=click.Choice(["processes", "ray"]), default="ray", show_default=True)
@click.option("--transport", default="tcp", show_default=True)
@click.option("--state-mib", default=1, show_default=True)
@click.option("--trials", default=3, show_default=True, help="Jobs, with three replacements each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(launcher: str, transport: str, state_mib: int, trials: int, as_json: bool) -> None:
    """Measure replacements by spares."""
    found = [each for _ in range(trials) for each in trial(launcher, transport, state_mib << 20)]
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    worst = max(each[-1] for each in found)
    if as_json:
        click.echo(json.dumps({"phases": PHASES, "medians_s": medians, "worst_s": worst, "all_s": found}))
        return
    for each in found:
        click.echo("  ".join(f"{name} {at:.3f} s" for name, at in zip(PHASES, each, strict=True)))
    text = ", ".join(f"{name} after {at:.2f} s" for name, at in zip(PHASES, medians, strict=True))
    click.echo(f"{launcher}, {transport}, {state_mib} MiB: medians {text}; {worst:.2f} s at most")


if __name__ == "__main__":
    main()
