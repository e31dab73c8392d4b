"""How two jobs share one fabric: the share of each, and small steps of one beside the bulk of the other.

    python benchmarks/two_jobs.py --fabric bcube:2x2 --rate 100mbit    # needs root: the fabric is emulated
    python benchmarks/two_jobs.py --case latency --small-class urgent  # small steps go first
    python benchmarks/two_jobs.py --case shares --fabric bcube:3x2 --second-fault kill:4

Every run lasts for some seconds. Shares: bulk alone, and two jobs of bulk, of which the second may have lost
a server and with it connections. A share is the bytes that a job adds while both run, over those that it adds
alone. Latency: small steps alone, beside bulk on a fabric of its own, and beside bulk on the same fabric. The
servers of both jobs share the cores of this machine, and bulk on a fabric of its own says what that costs;
where the cores are busy, they are what is shared, so take a low rate.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import bml
from bml import fabric as emulated
from bml.cli.values import TrafficClass
from bml.fabric import EmulatedFabric
from bml.lab.commands.quantities import parse_bytes

Row = dict[str, Any]
Times = list[tuple[float, float]]
_WARM_UP = 3


@dataclass(frozen=True)
class Load:
    """The steps of one job: their size, what it pauses between two, its class, and its fault."""

    nbytes: int
    pause_s: float = 0.0
    traffic_class: int | None = None
    fault: str = ""


def training(load: Load, begun: Path, stop: Path) -> Callable[[bml.Session], Times]:
    """Steps until the file `stop` is there; returns when each began and ended, on the machine's clock."""

    def train(session: bml.Session) -> Times:
        x = session.empty(load.nbytes // 4)
        x[:] = 1
        times = []
        while True:
            x[-1] = stop.exists()
            begun_s = monotonic()
            total = session.allreduce(x)
            times.append((begun_s, monotonic()))
            assert (total[:-1] == len(session.contributors)).all(), "a sum is wrong"
            if total[-1]:
                return times[_WARM_UP:]
            if len(times) == _WARM_UP:
                begun.touch()
            del total
            sleep(load.pause_s)

    return train


def run(
    network: EmulatedFabric, loads: list[Load], seconds: float, elsewhere: EmulatedFabric | None = None
) -> list[Times]:
    """Run these jobs at the same time for so many seconds; the step times of server 0 of each.

    The first job runs on the fabric `elsewhere`, if there is one.
    """
    networks = [elsewhere or network] + [network] * (len(loads) - 1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stop = folder / "stop"
        jobs, begun = [], [folder / f"begun{number}" for number in range(len(loads))]
        for load, file, used in zip(loads, begun, networks, strict=True):
            job = bml.start(
                training(load, file, stop),
                used.fabric.name,
                launcher="processes",
                emulated=used.name,
                traffic_class=load.traffic_class,
                faults=[f"{load.fault}@step=1"] if load.fault else [],
                prints=False,
            )
            jobs.append(stack.enter_context(job))
        until_s = monotonic() + 60
        while not all(file.exists() for file in begun):
            assert monotonic() < until_s, "a job does not begin"
            sleep(0.02)
        sleep(seconds)
        stop.touch()
        return [job.wait().value for job in jobs]


def up(name: str, shape: str, rate: str | int) -> EmulatedFabric:
    """Bring up a fabric of this process."""
    return emulated.up(shape, rate, name=f"{name}{os.getpid()}", maker=os.getpid())


def rates(jobs: list[Times], nbytes: list[int]) -> list[float]:
    """Bytes per second that each job adds while all run, with parts of the first and last step."""
    since, until = max(times[0][0] for times in jobs), min(times[-1][1] for times in jobs)
    return [
        sum(max(0.0, min(end, until) - max(begin, since)) / (end - begin) for begin, end in times)
        * size
        / (until - since)
        for times, size in zip(jobs, nbytes, strict=True)
    ]


def delays(times: Times) -> tuple[float, float]:
    """(median, 99th percentile) of the steps in seconds."""
    took = sorted(end - begin for begin, end in times)
    return statistics.median(took), took[int(len(took) * 0.99)]


def shares(network: EmulatedFabric, bulk: Load, second: Load, seconds: float) -> list[Row]:
    """Rows of two jobs of bulk, alone and together."""
    alone = [rates(run(network, [load], seconds), [load.nbytes])[0] for load in dict.fromkeys([bulk, second])]
    both = rates(run(network, [bulk, second], seconds), [bulk.nbytes, second.nbytes])
    return [
        {"case": "bulk beside second", "nbytes_per_s": both[0], "share": both[0] / alone[0]},
        {"case": "second beside bulk", "nbytes_per_s": both[1], "share": both[1] / alone[-1]},
    ]


def latency(network: EmulatedFabric, bulk: Load, small: Load, seconds: float) -> list[Row]:
    """Rows of small steps, alone and beside bulk elsewhere and here, and of bulk beside them."""
    bulk_alone = rates(run(network, [bulk], seconds), [bulk.nbytes])[0]
    alone, beside = run(network, [small], seconds)[0], run(network, [bulk, small], seconds)
    elsewhere = up("other", network.fabric.name, network.condition.rate_bit)
    try:
        apart = run(network, [bulk, small], seconds, elsewhere)[1]
    finally:
        elsewhere.down()
    kept = rates(beside, [bulk.nbytes, small.nbytes])[0]
    alone_s = delays(alone)[0]

    def row(case: str, times: Times) -> Row:
        median_s, p99_s = delays(times)
        return {"case": case, "median_s": median_s, "p99_s": p99_s, "ratio": median_s / alone_s}

    return [
        row("small alone", alone),
        row("small beside bulk elsewhere", apart),
        row("small beside bulk", beside[1]),
        {"case": "bulk beside small", "nbytes_per_s": kept, "share": kept / bulk_alone},
    ]


@click.command()
@click.option("--case", "cases", type=click.Choice(("shares", "latency")), multiple=True)
@click.option("--fabric", "shape", default="bcube:2x2", show_default=True)
@click.option("--rate", default="100mbit", show_default=True)
@click.option("--size", default="16MiB", show_default=True, help="Of the steps of bulk.")
@click.option("--small", default="4KiB", show_default=True)
@click.option("--pause-ms", default=5.0, show_default=True, help="Between two small steps.")
@click.option("--seconds", default=8.0, show_default=True, help="How long each run lasts.")
@click.option("--bulk-class", type=TrafficClass(), help="Traffic class of bulk.")
@click.option("--small-class", type=TrafficClass(), help="Traffic class of small steps.")
@click.option("--second-fault", default="", help="Of the second job of bulk, at its first step: kill:4.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    cases: tuple[str, ...],
    shape: str,
    rate: str,
    size: str,
    small: str,
    pause_ms: float,
    seconds: float,
    bulk_class: int | None,
    small_class: int | None,
    second_fault: str,
    as_json: bool,
) -> None:
    """Measure two jobs on one emulated fabric; both cases unless one is given."""
    bulk = Load(parse_bytes(size), traffic_class=bulk_class)
    little = Load(parse_bytes(small), pause_ms / 1000, small_class)
    network = up("two", shape, rate)
    rows = []
    try:
        if not cases or "shares" in cases:
            rows += shares(network, bulk, replace(bulk, fault=second_fault), seconds)
        if not cases or "latency" in cases:
            rows += latency(network, bulk, little, seconds)
    finally:
        network.down()
    if as_json:
        click.echo(json.dumps({"fabric": shape, "rate": rate, "size": size, "small": small, "rows": rows}))
        return
    table = Table("case", "MB/s", "share", "median ms", "p99 ms", "ratio")
    cells = [("nbytes_per_s", 1e-6), ("share", 1), ("median_s", 1e3), ("p99_s", 1e3), ("ratio", 1)]
    for row in rows:
        table.add_row(row["case"], *(f"{row[key] * by:.2f}" if key in row else "" for key, by in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
