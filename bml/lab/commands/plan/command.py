"""`bml plan`: compiles a schedule, proves it sound, and prints its cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bml.cli.output import current
from bml.cli.printed import check_writable, without
from bml.cli.tables import print_table
from bml.cluster.spec.constants import load_constants
from bml.lab.commands.plan.compare import of_fabric, papers
from bml.lab.commands.plan.compare import show as show_comparison
from bml.lab.commands.plan.draw import draw
from bml.lab.commands.quantities import parse_bytes, parse_rates
from bml.lab.commands.survey import command as survey
from bml.schedule import ALGORITHMS, Plan, bound, bound_kind
from bml.schedule import plan as make_plan
from bml.schedule.select.model import Price
from bml.topology import Fabric, UsageError, parse

_MANY_SERVERS = 512
"""With this many servers or more, planning takes seconds to minutes."""

OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """The answer of `bml plan --json`.

    Times are in units of T = P/B, rounded to 4 digits, except `seconds`, which planning took, and
    `modelled_s`, the time by the cost model if --bytes was given. `busiest_nic_bytes` are the bytes that the
    busiest NIC sends or receives in one direction, also with --bytes only. `candidates` are those between
    which `auto` decided by that size, the one that is taken first: `modelled_s` is null if it was not
    planned, as it takes `least_s` seconds at least, or if it cannot work here. `hottest_inner` is the load of
    the busiest inner link of a Fat-Tree in units of P, with paths chosen by hash.
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
    hottest_inner: float | None
    busiest_nic_bytes: int | None
    modelled_s: float | None
    candidates: list[dict[str, Any]]
    constants: str
    violations: list[str]
    verified_pieces: int
    seconds: float


@click.command()
@click.argument("fabric", required=False)
@click.option("--algorithm", default="auto", show_default=True, help=f"One of {', '.join(ALGORITHMS)}.")
@click.option("--fail", multiple=True, metavar="X", help="server:4, link:4/0 or switch:0/2; repeatable.")
@click.option(
    "--bytes",
    "size",
    metavar="P",
    help="Size of the vector, such as 64MiB; adds the bytes of the busiest NIC, and a time.",
)
@click.option("--rate", multiple=True, metavar="S/L=R", help="Rate of a link in units of B: 4/0=1/10.")
@click.option("--constants", type=click.Path(path_type=Path), help="File of the cost model's constants.")
@click.option(
    "--compare",
    "comparing",
    is_flag=True,
    help="Compare algorithms; without FABRIC, on the papers' fabrics; with --survey, fabrics of a size.",
)
@click.option(
    "--survey",
    "most_failures",
    type=click.IntRange(1, 8),
    metavar="F",
    help="Say what any 1 to F failures would cost.",
)
@click.option(
    "--samples",
    type=click.IntRange(10, 10**6),
    default=400,
    show_default=True,
    help="With --survey: if more sets of failures than this differ, look at so many random ones.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="With --survey: seed of the random ones."
)
@click.option(
    "--mtbf", metavar="TEXT", help="With --survey: time to a failure, server=1y,link=90d,switch=5y."
)
@click.option("--mttr", metavar="TEXT", help="With --survey: time to repair, 4h or by kind as --mtbf.")
@click.option("--markdown", is_flag=True, help="Print the tables of --compare as Markdown.")
@click.option(
    "--draw",
    "picture",
    type=click.Path(path_type=Path),
    help="Draw trees, or the survey, into an .svg or .png.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def plan(
    ctx: click.Context,
    fabric: str | None,
    algorithm: str,
    fail: tuple[str, ...],
    size: str | None,
    rate: tuple[str, ...],
    constants: Path | None,
    comparing: bool,
    most_failures: int | None,
    samples: int,
    seed: int,
    mtbf: str | None,
    mttr: str | None,
    markdown: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Compile and verify a schedule, and print its cost.

    \b
    Example:
      bml plan bcube:4x2 --algorithm detour --fail server:0 --json
      bml plan bcube:4x2 --bytes 16KiB
      bml plan torus:4x2 --compare
      bml plan bcube:4x2 --algorithm detour --fail server:0 --draw trees.svg
      bml plan bcube:4x2 --survey 3 --mtbf server=1y,link=1y,switch=5y --mttr 4h
    """
    if fabric is None:
        if not comparing:
            raise click.UsageError("Missing argument 'FABRIC'.")
        show_comparison(papers(), _form(as_json, markdown))
        return
    wanted = parse(fabric).with_rates(parse_rates(rate)).without(*fail)
    if most_failures is not None:
        if size is not None or markdown:
            raise UsageError("--survey gives times in T, whatever the size: leave out --bytes and --markdown")
        survey.run(
            survey.Wanted(
                wanted, most_failures, algorithm, samples, seed, mtbf, mttr, comparing, picture, as_json
            )
        )
        return
    if mtbf is not None or mttr is not None:
        raise UsageError("--mtbf and --mttr go with --survey F")
    if comparing:
        show_comparison([of_fabric(wanted)], _form(as_json, markdown))
        return
    check_writable(picture, "--draw")
    nbytes = None if size is None else parse_bytes(size)
    known, source = load_constants(constants)
    with _progress(wanted) as on_stage:
        on_stage("building the schedule")
        start_s = time.perf_counter()
        made = make_plan(wanted, algorithm, nbytes, known)
        pieces = made.pieces
        seconds = time.perf_counter() - start_s
        modelled_s = None if nbytes is None else made.counts().seconds(nbytes, known)
        report = _report(made, pieces, nbytes, seconds, modelled_s, source, on_stage)
    if picture is not None:
        click.echo(draw(wanted, made.algorithm, picture), err=True)
    if as_json:
        current().answer(asdict(report))
    else:
        _show(report, made.prices)
    if report.violations:
        ctx.exit(1)


@contextmanager
def _progress(fabric: Fabric) -> Iterator[OnStage]:
    """Show the stage on standard error; without a terminal, a line per stage if planning takes long."""
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        slow = fabric.n_servers >= _MANY_SERVERS
        yield lambda text: click.echo(f"{fabric.name}: {text}", err=True) if slow else None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("planning")
        yield lambda text: progress.update(task, description=text)


def _form(as_json: bool, markdown: bool) -> str:
    return "json" if as_json else "markdown" if markdown else "table"


def _report(
    made: Plan,
    pieces: int,
    nbytes: int | None,
    seconds: float,
    modelled_s: float | None,
    constants: str,
    on_stage: OnStage,
) -> Report:
    on_stage("counting the load of every NIC")
    time_t, counted, staged = made.gst(), made.load(), made.gst_staged()
    on_stage("proving the lower bound")
    least, kind = bound(made.fabric), bound_kind(made.fabric)
    on_stage(f"verifying {made.verified_pieces} of {pieces} pieces")
    return Report(
        fabric=made.fabric.name,
        algorithm=made.algorithm,
        why=made.why,
        failures=[str(failure) for failure in sorted(made.fabric.failures)],
        survivors=len(made.fabric.servers),
        pieces=pieces,
        detours=made.detours,
        gst=_rounded(time_t),
        gst_staged=_rounded(staged),
        bound=_rounded(least),
        bound_kind=kind,
        hottest_inner=_rounded(counted.hottest_inner) if counted.inner else None,
        busiest_nic_bytes=None if nbytes is None else ceil(counted.busiest * nbytes),
        modelled_s=None if modelled_s is None else round(modelled_s, 9),
        candidates=[_candidate(price) for price in made.prices],
        constants=constants,
        violations=made.violations(),
        verified_pieces=made.verified_pieces,
        seconds=round(seconds, 6),
    )


def _candidate(price: Price) -> dict[str, Any]:
    seconds = None if price.seconds is None else round(price.seconds, 9)
    return {
        "algorithm": price.algorithm,
        "modelled_s": seconds,
        "least_s": round(price.least_s, 9),
        "works": price.works,
    }


def _rounded(value: Fraction) -> float:
    return round(float(value), 4)


def _show(report: Report, prices: tuple[Price, ...]) -> None:
    """Print the report as a table of two columns."""
    table = Table(title=without(report.fabric, report.failures))
    table.add_column("quantity")
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
    if report.hottest_inner is not None:
        table.add_row("hottest inner link, by ECMP", f"{report.hottest_inner:.4f} P")
    if report.modelled_s is not None:
        table.add_row("time by the cost model", f"{report.modelled_s * 1e6:.1f} µs ({report.constants})")
    if prices:
        table.add_row("candidates", "\n".join(map(str, prices)))
    table.add_row("planned in", f"{report.seconds * 1e3:.1f} ms")
    table.add_row("verified", "; ".join(report.violations) or _soundness(report))
    print_table(table, Console(markup=False))


def _soundness(report: Report) -> str:
    if report.verified_pieces == report.pieces:
        return "sound"
    return (
        f"sound: {report.verified_pieces} of {report.pieces} pieces, drawn as every server has them; "
        "loads and times by formula or symmetry"
    )
