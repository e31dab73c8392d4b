"""The answer of `bml sim`: a simulation, its report, its table and its timeline."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bml.cli.printed import without, write_file
from bml.cli.tables import print_table
from bml.lab.commands.sim.asked import Asked, Report
from bml.lab.commands.sim.options import rate_of
from bml.lab.flows.simulate import Conditions, Outcome, simulate
from bml.lab.flows.timeline import timeline
from bml.schedule import Plan
from bml.schedule import plan as make_plan
from bml.topology.fattree import with_seed

_SHOWN = 5
"""Links of the table; JSON has all."""


def answer(asked: Asked) -> tuple[Report, Outcome]:
    """Plan and simulate, for each seed of ECMP's hash anew; return the report and the step of the first seed.

    Raises:
        FabricError: the algorithm cannot work on the fabric, or its survivors are not connected.
        UsageError: there is no such algorithm, or it is too large to be planned or simulated.
    """
    start_s = time.perf_counter()
    made = planned(asked)
    fastest = float(made.gst())
    planned_s = time.perf_counter()
    outcome = simulate(made, conditions(asked))
    others = (
        simulate(replace(made, fabric=with_seed(asked.fabric, seed)), conditions(asked)).seconds
        for seed in range(1, asked.seeds)
    )
    seeds = [outcome.seconds, *others]
    stop_s = time.perf_counter()
    report = Report(
        fabric=asked.fabric.name,
        failures=list(asked.failures),
        algorithm=made.algorithm,
        why=made.why,
        survivors=len(asked.fabric.servers),
        nbytes=asked.nbytes,
        rate_bit=asked.rate_bit,
        goodput=asked.goodput,
        delay_s=asked.delay_s,
        gst_s=outcome.seconds,
        gst=_in_whole(outcome.seconds, asked),
        planned=round(fastest, 4),
        seeds=[_in_whole(seconds, asked) for seconds in seeds],
        transfers=outcome.n_transfers,
        stands_for=outcome.stands_for,
        links=_links(outcome),
        planning_s=round(planned_s - start_s, 6),
        simulating_s=round(stop_s - planned_s, 6),
    )
    return report, outcome


def planned(asked: Asked) -> Plan:
    """Plan what is asked for. Raises FabricError and UsageError as `answer`."""
    return make_plan(asked.fabric, asked.algorithm, asked.nbytes, asked.constants)


def conditions(asked: Asked) -> Conditions:
    """Return what the step is simulated under."""
    return Conditions(asked.nbytes, asked.rate, asked.delay_s, asked.slice_nbytes)


def _in_whole(seconds: float, asked: Asked) -> float:
    return round(seconds / asked.whole_s, 6) if asked.whole_s else 0.0


def _links(outcome: Outcome) -> list[dict[str, Any]]:
    """Return all links, the busiest first."""
    columns = outcome.carried, outcome.utilisation, outcome.crossing
    order = np.argsort(-columns[1], kind="stable").tolist()
    carried, utilisation, crossing = (column.tolist() for column in columns)
    return [
        {
            "link": outcome.network.name[at],
            "bytes": round(carried[at]),
            "utilisation": round(utilisation[at], 4),
            "connections": crossing[at],
        }
        for at in order
    ]


def show(report: Report, delay_source: str) -> None:
    """Print the report as a table of two columns."""
    table = Table(title=without(report.fabric, report.failures))
    table.add_column("quantity")
    table.add_column("value")
    table.add_row("algorithm", f"{report.algorithm} ({report.why})")
    table.add_row("survivors", str(report.survivors))
    table.add_row("time of a step", f"{report.gst_s * 1e3:.3f} ms, {report.gst:.4f} T")
    table.add_row("time of the busiest NIC", f"{report.planned:.4f} T, without start-ups")
    if len(report.seeds) > 1:
        table.add_row(f"over {len(report.seeds)} seeds", _spread(report.seeds))
    table.add_row("rate of a NIC", rate_of(report.rate_bit, report.goodput))
    table.add_row("delay of a hop", f"{report.delay_s * 1e6:g} µs ({delay_source})")
    table.add_row("transfers", _transfers(report))
    for each in report.links[:_SHOWN]:
        busy = f"busy {each['utilisation']:.1%}, {each['bytes']} bytes, {each['connections']} connection(s)"
        table.add_row(f"link {each['link']}", busy)
    rest = [each["utilisation"] for each in report.links]
    if len(rest) > _SHOWN:
        table.add_row(
            f"all {len(rest)} links",
            f"busy {min(rest):.1%} to {max(rest):.1%}, {np.mean(rest):.1%} on average",
        )
    table.add_row("planned, simulated in", f"{report.planning_s:.3f} s, {report.simulating_s:.3f} s")
    print_table(table, Console(markup=False))


def _spread(seeds: list[float]) -> str:
    return f"{min(seeds):.4f} to {max(seeds):.4f} T, median {median(seeds):.4f} T"


def _transfers(report: Report) -> str:
    if report.stands_for == 1:
        return str(report.transfers)
    return f"{report.transfers} of server 0, which stands for all {report.stands_for}"


def write_trace(outcome: Outcome, target: Path) -> str:
    """Write the timeline; return what there is to say of it."""
    written = timeline(outcome)
    write_file(target, json.dumps(written))
    left_out = f", without the last {written['leftOut']} transfers" if written["leftOut"] else ""
    return f"timeline in {target}{left_out}: open it in ui.perfetto.dev"
