"""Is the schedule that `auto` takes the best one for small steps on a damaged fabric? Measured, in turn.

    python benchmarks/choice.py --fabric bcube:3x2 --fail server:0
    python benchmarks/choice.py --fabric bcube:3x2 --fail server:0 --rate 200mbit    # needs root

One job for each algorithm, all alive at the same time; they take turns, so that other load hits all alike.
With `--rate` they run on an emulated fabric. For each size: the median step of every algorithm, what `auto`
took, and how many times as long as the best of the others it was.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bml import fabric as emulated
from bml.lab.bench.contenders import JobSettings, Own
from bml.lab.commands.quantities import parse_bytes
from bml.schedule import plan
from bml.topology import Fabric, FabricError, parse

_ALGORITHMS = ("auto", "exchange", "mesh", "detour", "packed")
_NAME = "choice"


@contextmanager
def jobs(fabric: Fabric, where: str | None) -> Iterator[dict[str, Own]]:
    """The jobs by their algorithm; one that cannot work on the fabric is left out."""
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        found: dict[str, Own] = {}
        for algorithm in _ALGORITHMS:
            if not _works(fabric, algorithm):
                continue
            (own := folder / algorithm).mkdir()
            found[algorithm] = Own(own, JobSettings(fabric, algorithm, where))
            ending.callback(found[algorithm].close)
            found[algorithm].start()
        yield found


def _works(fabric: Fabric, algorithm: str) -> bool:
    try:
        plan(fabric, algorithm).counts()
    except FabricError:
        return False
    return True


def measure(running: dict[str, Own], sizes: list[int], turns: int, block_s: float) -> list[dict[str, Any]]:
    """For each size the median of a step of every algorithm, in seconds."""
    rows = []
    for nbytes in sizes:
        times: dict[str, list[float]] = {algorithm: [] for algorithm in running}
        counts = {}
        for algorithm, job in running.items():
            assert job.check(nbytes) == 0, f"{algorithm} is wrong at {nbytes} bytes"
            took_s = statistics.median(job.time(nbytes, 3).steps_s)
            counts[algorithm] = max(3, min(2000, int(block_s / took_s)))
        for _ in range(turns):
            for algorithm, job in running.items():
                times[algorithm] += job.time(nbytes, counts[algorithm]).steps_s
        medians = {algorithm: statistics.median(found) for algorithm, found in times.items()}
        best_s = min(took_s for algorithm, took_s in medians.items() if algorithm != "auto")
        rows.append({"nbytes": nbytes, "median_s": medians, "over_best": medians["auto"] / best_s})
    return rows


def run(
    fabric: Fabric, rate: str | None, sizes: list[int], turns: int, block_s: float
) -> list[dict[str, Any]]:
    """Measure on this machine's own network, or on an emulated fabric of that rate."""
    with ExitStack() as ending:
        if rate is not None:
            network = emulated.up(fabric.name, rate, name=_NAME)
            ending.callback(network.down)
        running = ending.enter_context(jobs(fabric, None if rate is None else _NAME))
        return measure(running, sizes, turns, block_s)


@click.command()
@click.option("--fabric", "shape", default="bcube:3x2", show_default=True)
@click.option("--fail", "failures", multiple=True, default=("server:0",), show_default=True)
@click.option("--rate", help="On an emulated fabric with NICs of this rate, such as 200mbit.")
@click.option("--sizes", default="4KiB,16KiB,64KiB,256KiB,1MiB", show_default=True)
@click.option("--turns", default=5, show_default=True)
@click.option("--block-s", default=0.3, show_default=True, help="Seconds of a turn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(
    shape: str,
    failures: tuple[str, ...],
    rate: str | None,
    sizes: str,
    turns: int,
    block_s: float,
    as_json: bool,
) -> None:
    """Measure `auto` beside the algorithms that it chooses from."""
    fabric = parse(shape).without(*failures)
    rows = run(fabric, rate, [parse_bytes(size) for size in sizes.split(",")], turns, block_s)
    if as_json:
        click.echo(json.dumps({"fabric": shape, "failures": failures, "rate": rate, "rows": rows}))
        return
    algorithms = list(rows[0]["median_s"])
    table = Table("bytes", *algorithms, "auto / best", title=f"{fabric}, {rate or 'loopback'}, ms")
    for row in rows:
        times = [f"{row['median_s'][algorithm] * 1e3:.2f}" for algorithm in algorithms]
        table.add_row(str(row["nbytes"]), *times, f"{row['over_best']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
