"""The answer of `bml sim train`: its report, its tables, and comparisons."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bml.cli.printed import without
from bml.cli.tables import print_table
from bml.lab.commands.sim.options import nics, rate_of
from bml.lab.flows.prices import equal_in_size
from bml.lab.flows.training.job import train
from bml.lab.flows.training.layers import PARAMETER_NBYTES
from bml.lab.flows.training.training import Part, Training
from bml.lab.flows.training.wires import Network
from bml.schedule import ALGORITHMS
from bml.topology import FabricError, UsageError


@dataclass(frozen=True)
class Asked:
    """What a user asked for.

    `rate_bit` is bits per second of a NIC, of which `goodput` is payload. `computation` says in words where
    the seconds of computation come from.
    """

    model: str
    training: Training
    network: Network
    rate_bit: float
    goodput: float
    computation: str


@dataclass(frozen=True)
class TrainReport:
    """The answer of `bml sim train --json`.

    `computation` says where the seconds of computation come from, in words.
    `jct_s` is the time of the whole job in seconds. Of a mean `iteration_s`, `compute_s` the slowest server
    computes and `exposed_s` it waits for the wires. `lost_s` of the job went until failures were noticed
    and views had changed. `compute_share` is computation over `jct_s`. `views` are those of
    `bml.lab.flows.training.job`, ready for JSON. `simulating_s` is what this command took.
    """

    fabric: str
    failures: list[str]
    model: str
    layers: int
    parameters: int
    nbytes: int
    overlap: str
    order: str
    rate_bit: float
    goodput: float
    delay_s: float
    computation: str
    iterations: int
    jct_s: float
    iteration_s: float
    compute_s: float
    exposed_s: float
    lost_s: float
    compute_share: float
    views: list[dict[str, Any]]
    simulating_s: float


def answer(asked: Asked) -> TrainReport:
    """Simulate the training.

    Raises:
        FabricError: the survivors cannot all reach one another, or the algorithm cannot work.
        UsageError: there is no such algorithm, or it is too large to be planned or simulated.
    """
    start_s = time.perf_counter()
    training, network = asked.training, asked.network
    views = train(training, network)
    n = training.iterations
    jct_s, lost_s = sum(view.seconds for view in views), sum(view.lost_s for view in views)
    computed_s = sum(view.iterations * view.compute_s for view in views)
    n_parameters = sum(layer.n_parameters for layer in training.layers)
    first = training.parts[0]
    return TrainReport(
        fabric=first.fabric.name,
        failures=list(first.failures),
        model=asked.model,
        layers=len(training.layers),
        parameters=n_parameters,
        nbytes=n_parameters * PARAMETER_NBYTES,
        overlap=training.overlap.value,
        order="need" if training.overlap.value == "forward" and training.by_need else "begin",
        rate_bit=asked.rate_bit,
        goodput=asked.goodput,
        delay_s=network.delay_s,
        computation=asked.computation,
        iterations=n,
        jct_s=jct_s,
        iteration_s=(jct_s - lost_s) / n,
        compute_s=computed_s / n,
        exposed_s=max(0.0, jct_s - lost_s - computed_s) / n,
        lost_s=lost_s,
        compute_share=round(computed_s / jct_s, 6) if jct_s else 0.0,
        views=[asdict(view) for view in views],
        simulating_s=round(time.perf_counter() - start_s, 6),
    )


def compared(asked: Asked) -> dict[str, Any]:
    """Simulate the training with every algorithm, and on fabrics of about this size; return both tables.

    Times are None where something cannot work, and `why` says why. On another fabric nothing fails and no
    part is slow, and its servers share the same work as those of the one asked for.

    Raises:
        UsageError: there is no such algorithm.
    """
    training, network = asked.training, asked.network
    names = [name for name in ALGORITHMS if name != "auto"]
    names = names if network.algorithm == "auto" else [network.algorithm]
    algorithms = [
        {"algorithm": name, **_timed(replace(asked, network=replace(network, algorithm=name)))}
        for name in names
    ]
    first = training.parts[0].fabric
    fabrics = []
    for fabric in equal_in_size(first):
        there = replace(training, parts=[Part(0, fabric)], slow=None, sharers=len(first.servers))
        timed = _timed(replace(asked, training=there))
        fabrics.append({"fabric": fabric.name, "servers": fabric.n_servers, **timed})
    return {
        "fabric": str(first),
        "model": asked.model,
        "iterations": training.iterations,
        "overlap": training.overlap.value,
        "rate_bit": asked.rate_bit,
        "computation": asked.computation,
        "algorithms": algorithms,
        "fabrics": fabrics,
    }


def _timed(asked: Asked) -> dict[str, Any]:
    try:
        found = answer(asked)
    except (FabricError, UsageError) as error:
        nothing = dict.fromkeys(("iteration_s", "compute_share", "exposed_s", "jct_s"))
        return {"by": [asked.network.algorithm], **nothing, "why": str(error)}
    return {
        "by": _algorithms(found),
        "iteration_s": found.iteration_s,
        "compute_share": found.compute_share,
        "exposed_s": found.exposed_s,
        "jct_s": found.jct_s,
        "why": "",
    }


def show(report: TrainReport) -> None:
    """Print the report: the job, and a line for each view."""
    console = Console(markup=False)
    fabric = without(report.fabric, report.failures)
    table = Table(title=f"{report.model} on {fabric}")
    table.add_column("quantity")
    table.add_column("value")
    table.add_row("layers, parameters", f"{report.layers}, {report.parameters}")
    table.add_row("rate of a NIC", rate_of(report.rate_bit, report.goodput))
    table.add_row("computation", report.computation)
    table.add_row("overlap", _overlap(report))
    table.add_row("algorithms", ", ".join(_algorithms(report)))
    table.add_row("iterations", str(report.iterations))
    table.add_row("an iteration", f"{ms(report.iteration_s)} ms")
    table.add_row("of it computation", f"{ms(report.compute_s)} ms")
    table.add_row("of it exposed communication", f"{ms(report.exposed_s)} ms")
    table.add_row("the job", f"{report.jct_s:.3f} s, computing {report.compute_share:.1%}")
    if report.lost_s:
        table.add_row("of it until views had changed", f"{report.lost_s:.3f} s")
    table.add_row("simulated in", f"{report.simulating_s:.3f} s")
    print_table(table, console)
    table = Table(title="views: milliseconds of an iteration")
    for head in ("view", "since", "alive", "all", "computed", "exposed", "wires"):
        table.add_column(head, justify="right")
    table.add_column("failed")
    for view in report.views:
        numbers = (str(view[key]) for key in ("view", "since", "survivors"))
        times = (ms(view[key]) for key in ("iteration_s", "compute_s", "exposed_s", "communication_s"))
        table.add_row(*numbers, *times, ", ".join(view["failures"]))
    print_table(table, console)


def _algorithms(report: TrainReport) -> list[str]:
    return list(dict.fromkeys(name for view in report.views for name in view["algorithms"]))


def _overlap(report: TrainReport) -> str:
    match report.overlap:
        case "none":
            return "none: the wires begin when backward has ended"
        case "backward":
            return "with backward"
        case _:
            order = "order of need" if report.order == "need" else "order of begin"
            return f"with backward and the next forward pass, in {order}"


def show_tables(tables: dict[str, Any]) -> None:
    """Print both tables, and below them why something has no time."""
    console = Console(markup=False)
    rows = {"algorithm": tables["algorithms"], "fabric": tables["fabrics"]}
    titles = {
        "algorithm": f"{tables['model']} on {tables['fabric']}, milliseconds of an iteration",
        "fabric": "whole fabrics of about this size that share the same work",
    }
    for head, found in rows.items():
        table = Table(title=titles[head])
        table.add_column(head)
        if head == "fabric":
            table.add_column("servers", justify="right")
            table.add_column("largest by")
        for column in ("ms", "computing", "exposed", "job, s"):
            table.add_column(column, justify="right")
        for row in found:
            more = [str(row["servers"]), *(row["by"][:1] or ["-"])] if head == "fabric" else []
            table.add_row(row[head], *more, *_numbers(row))
        print_table(table, console)
    console.print(
        f"{nics(tables['rate_bit'])}, computation {tables['computation']}: other rates may change the order",
        soft_wrap=True,
    )
    for row in [*tables["algorithms"], *tables["fabrics"]]:
        if row["why"]:
            console.print(f"- {row.get('fabric') or row['algorithm']}: {row['why']}", soft_wrap=True)


def _numbers(row: dict[str, Any]) -> list[str]:
    if row["jct_s"] is None:
        return ["-"] * 4
    share = f"{row['compute_share']:.1%}"
    return [ms(row["iteration_s"]), share, ms(row["exposed_s"]), f"{row['jct_s']:.3f}"]


def ms(seconds: float | None) -> str:
    """Return milliseconds as they stand in a table."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.4g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
