"""`bml plan`: compile a schedule, prove it sound, and say what it costs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil

import click
from rich.console import Console
from rich.table import Table

from bml.schedule import ALGORITHMS, Plan, bound, gst, gst_staged, verify
from bml.schedule import plan as make_plan
from topology import UsageError, parse

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Report:
    """What `bml plan --json` prints.

    Times are in units of T = P/B, rounded to 4 digits. `seconds` is the time that planning took,
    `busiest_nic_bytes` what the busiest NIC sends or receives in one direction if --bytes was given.
    """

    fabric: str
    algorithm: str
    why: str
    failures: list[str]
    survivors: int
    pieces: int
    detours: int
    gst: float
    gst_staged: float
    bound: float
    bound_kind: str
    busiest_nic_bytes: int | None
    violations: list[str]
    seconds: float


@click.command()
@click.argument("fabric")
@click.option("--algorithm", default="auto", show_default=True, help=f"One of {', '.join(ALGORITHMS)}.")
@click.option("--fail", multiple=True, metavar="X", help="server:4, link:4/0 or switch:0/2; repeatable.")
@click.option("--bytes", "size", metavar="P", help="Size of the vector, such as 64MiB: adds bytes per NIC.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def plan(
    ctx: click.Context, fabric: str, algorithm: str, fail: tuple[str, ...], size: str | None, as_json: bool
) -> None:
    """Compile and verify a schedule for FABRIC and print what it costs.

    \b
    Example:
      bml plan bcube:4x2 --algorithm detour --fail server:0 --json
    """
    nbytes = None if size is None else parse_bytes(size)
    start_s = time.perf_counter()
    made = make_plan(parse(fabric).without(*fail), algorithm)
    pieces = made.forest.pieces
    report = _report(made, pieces, nbytes, time.perf_counter() - start_s)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        _show(report)
    if report.violations:
        ctx.exit(1)


def parse_bytes(text: str) -> int:
    """Read a size: `4096`, `4KiB` and `64MiB` (powers of 2), `10MB` (powers of 10).

    Raises:
        UsageError: the text is no size.
    """
    found = re.fullmatch(r"([0-9]+)\s*([KMG]I?B)?", text.strip().upper())
    if found is None:
        raise UsageError(f"'{text}' is not a size: write it like 4096, 4KiB, 64MiB or 1GB")
    return int(found[1]) * _UNITS[found[2] or ""]


def _report(made: Plan, pieces: int, nbytes: int | None, seconds: float) -> Report:
    time_t = gst(made.forest, made.fabric)
    return Report(
        fabric=made.fabric.name,
        algorithm=made.algorithm,
        why=made.why,
        failures=[str(failure) for failure in sorted(made.fabric.failures)],
        survivors=len(made.fabric.servers),
        pieces=pieces,
        detours=len(made.forest.detours),
        gst=_rounded(time_t),
        gst_staged=_rounded(gst_staged(made.forest, made.fabric)),
        bound=_rounded(bound(made.fabric)),
        bound_kind="cut bound",
        busiest_nic_bytes=None if nbytes is None else ceil(time_t * nbytes),
        violations=verify(made.forest, made.fabric),
        seconds=round(seconds, 6),
    )


def _rounded(value: Fraction) -> float:
    return round(float(value), 4)


def _show(report: Report) -> None:
    """Print the report as a table."""
    table = Table(title=" without ".join(filter(None, [report.fabric, ", ".join(report.failures)])))
    table.add_column("what")
    table.add_column("value")
    table.add_row("algorithm", f"{report.algorithm} ({report.why})")
    table.add_row("survivors", str(report.survivors))
    table.add_row("pieces", str(report.pieces))
    table.add_row("tree edges by detour", str(report.detours))
    table.add_row("GST, pipelined", f"{report.gst:.4f} T")
    table.add_row("GST, stage by stage", f"{report.gst_staged:.4f} T")
    table.add_row(report.bound_kind, f"{report.bound:.4f} T")
    if report.busiest_nic_bytes is not None:
        table.add_row("busiest NIC, one direction", f"{report.busiest_nic_bytes} bytes")
    table.add_row("planned in", f"{report.seconds * 1e3:.1f} ms")
    table.add_row("verified", "; ".join(report.violations) or "sound")
    Console(markup=False).print(table)
