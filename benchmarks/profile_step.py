"""Where the time of one server goes in a step, function by function, in processor time.

    python benchmarks/profile_step.py --fabric bcube:3x2 --size 64MiB
    python benchmarks/profile_step.py --fabric bcube:2x2 --size 4KiB --steps 300

Waiting does not count, so other load on the machine hardly matters. First the steps are run as they are:
processor time of the loop's thread and of the training thread, page faults, switches and frames, per step.
Then the training thread of one server, which polls while it waits, runs them under cProfile, which costs time
itself: take its shares, not its sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import bml
from bml.lab.commands.quantities import parse_bytes

WARM_UP = 3


def training(nbytes: int, steps: int, profiled: int) -> Callable[[bml.Session], dict[str, Any]]:
    def train(session: bml.Session) -> dict[str, Any]:
        import cProfile
        import pstats
        import resource
        import threading
        import time

        server: Any = session._communicator
        vector = session.empty(nbytes // 4)
        vector[:] = 1

        def in_loop(function: Callable[[], Any]) -> Any:
            """Call a function in the server's loop and return its result."""
            answers: list[Any] = []
            done = threading.Event()
            server._shell.poller.soon(lambda: (answers.append(function()), done.set()))
            server._shell.poller.wake()
            done.wait()
            return answers[0]

        def counters() -> dict[str, float]:
            used = resource.getrusage(resource.RUSAGE_SELF)
            return {
                "loop_ms": in_loop(time.thread_time) * 1e3,
                "training_ms": time.thread_time() * 1e3,
                "system_ms": used.ru_stime * 1e3,
                "page_faults": used.ru_minflt,
                "switches": used.ru_nvcsw,
                "frames_sent": sum(link["frames_sent"] for link in server.traffic()["links"].values()),
            }

        for _ in range(WARM_UP):
            session.allreduce(vector)
        before = counters()
        for _ in range(steps):
            session.allreduce(vector)
        after = counters()
        found: dict[str, Any] = {key: (after[key] - before[key]) / steps for key in before}
        profile = cProfile.Profile(time.thread_time)
        if session.server == profiled:
            profile.enable()
        for _ in range(steps):
            session.allreduce(vector)
        if session.server == profiled:
            profile.disable()
            table = pstats.Stats(profile).stats  # type: ignore[attr-defined]
            found["functions"] = [
                {"name": f"{file.rpartition('/')[2]}:{line} {name}", "calls": calls / steps, "own_s": own}
                for (file, line, name), (_, calls, own, _, _) in table.items()
            ]
        return found

    return train


@click.command()
@click.option("--fabric", default="bcube:3x2", show_default=True)
@click.option("--size", default="64MiB", show_default=True)
@click.option("--algorithm", default="auto", show_default=True)
@click.option("--steps", default=6, show_default=True)
@click.option("--server", default=1, show_default=True, help="Which one is profiled.")
@click.option("--top", default=20, show_default=True, help="Functions to show.")
@click.option("--json", "as_json", is_flag=True)
def main(fabric: str, size: str, algorithm: str, steps: int, server: int, top: int, as_json: bool) -> None:
    """Profile one server of a job of plain processes on this machine."""
    train = training(parse_bytes(size), steps, server)
    job = {"launcher": "processes", "transport": "tcp", "algorithm": algorithm}
    result = bml.launch(train, fabric, detect_s=5.0, **job)
    functions = result.values[server].pop("functions")
    functions.sort(key=lambda each: -each["own_s"])
    total_s = sum(each["own_s"] for each in functions)
    for each in functions:
        each["share"] = each.pop("own_s") / total_s
    counted = result.values[server]
    everybody_ms = sum(each["loop_ms"] + each["training_ms"] for each in result.values.values())
    if as_json:
        click.echo(json.dumps({**counted, "all_servers_ms": everybody_ms, "functions": functions[:top]}))
        return
    summary = ", ".join(f"{key} {value:.3g}" for key, value in counted.items())
    click.echo(f"{fabric}, {size}: {everybody_ms:.3g} ms of processor time a step on all servers together")
    click.echo(f"server {server}, per step: {summary}")
    table = Table("function", "calls a step", "share", title=f"server {server}")
    for each in functions[:top]:
        table.add_row(each["name"], f"{each['calls']:.1f}", f"{each['share'] * 100:.1f} %")
    Console(markup=False).print(table)


if __name__ == "__main__":
    main()
