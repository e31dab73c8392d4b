"""`bml plan --survey F`: what any 1, 2, ... F failures would cost, as tables, JSON or a picture."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bml.cli.output import current
from bml.cli.printed import check_writable
from bml.cli.tables import print_table
from bml.io.workers import workers
from bml.lab.bench import plot
from bml.lab.flows.prices import equal_in_size
from bml.lab.survey.cost import Cost, cost_of
from bml.lab.survey.likeness import likeness
from bml.lab.survey.reliability import Expected, expected, read_dead_shares
from bml.lab.survey.sets import parts_of
from bml.lab.survey.survey import Case, Interval, Row, Survey, survey
from bml.topology import Fabric, Failure, FatTree

_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_WORST = 3
_FEW = 32
"""Sets that are planned sooner than another process has started."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for: see the options of `bml plan`."""

    fabric: Fabric
    failures: int
    algorithm: str
    samples: int
    seed: int
    mtbf: str | None
    mttr: str | None
    comparing: bool
    picture: Path | None
    as_json: bool


def run(wanted: Wanted) -> None:
    """Survey the fabric, with --compare also others of its size, and print what was found.

    Raises:
        UsageError: an option cannot be read, or there are fewer parts than failures.
        FabricError: the algorithm cannot work on some damaged fabric.
    """
    dead = read_dead_shares(wanted.mtbf, wanted.mttr)
    if wanted.picture is not None:
        check_writable(wanted.picture, "--draw")
        plot.check(wanted.picture)
    found: list[tuple[Survey, Expected | None, float]] = []
    for fabric in [wanted.fabric, *(_others(wanted) if wanted.comparing else [])]:
        begun_s = time.perf_counter()
        costs = partial(_costs, fabric, wanted.algorithm)
        surveyed = survey(fabric, wanted.failures, wanted.samples, wanted.seed, costs)
        seconds = time.perf_counter() - begun_s
        found.append((surveyed, expected(surveyed, dead) if dead is not None else None, seconds))
    if wanted.picture is not None:
        click.echo(_draw([surveyed for surveyed, _, _ in found], wanted.picture), err=True)
    if wanted.as_json:
        current().answer({"surveys": [_answer(*each) for each in found]})
        return
    for surveyed, weighed, seconds in found:
        _show(surveyed, weighed, seconds)


def _others(wanted: Wanted) -> Iterable[Fabric]:
    """The healthy fabrics of about the same size that have as many parts as are to fail."""
    for each in equal_in_size(wanted.fabric):
        if each.name == wanted.fabric.name:
            continue
        if len(parts_of(each)) >= wanted.failures:
            yield each
        else:
            click.echo(f"{each.name} is left out: it has fewer than {wanted.failures} parts", err=True)


def _costs(fabric: Fabric, algorithm: str, sets: Sequence[frozenset[Failure]]) -> Iterable[Cost]:
    """Plan for each set, on all cores if that is worth it, and say how far that is."""
    columns = TextColumn(f"{fabric.name}: sets"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    console = Console(stderr=True)
    hidden = not console.is_terminal
    one = partial(_cost, fabric, algorithm)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden, transient=True) as bar:
        if len(sets) <= _FEW:
            yield from bar.track(map(one, sets), total=len(sets))
            return
        with workers(min(os.cpu_count() or 1, len(sets))) as pool:
            yield from bar.track(pool.map(one, sets, chunksize=4), total=len(sets))


def _cost(fabric: Fabric, algorithm: str, failures: frozenset[Failure]) -> Cost:
    return cost_of(fabric, failures, algorithm)


def _answer(surveyed: Survey, weighed: Expected | None, seconds: float) -> dict[str, Any]:
    """Make the JSON of one survey; times are in units of T = P/B, bandwidths in units of B."""
    return {
        "fabric": str(surveyed.fabric),
        "rows": [_row(row) for row in surveyed.rows],
        "expected": None if weighed is None else asdict(weighed),
        "seconds": round(seconds, 3),
    }


def _row(row: Row) -> dict[str, Any]:
    mean = row.mean
    return {
        "failures": row.n_failures,
        "sets": row.n_sets,
        "exact": row.exact,
        "counted": row.n_counted,
        "different": len(row.cases),
        "connected": asdict(row.connected),
        "gst": None if mean is None else asdict(mean),
        "quantiles": {f"{share:g}": row.quantile(share) for share in _QUANTILES},
        "most_over_bound": row.most_over_bound,
        "worst": [_case(case, row.exact) for case in row.worst(_WORST)],
    }


def _case(case: Case, exact: bool) -> dict[str, Any]:
    cost = case.cost
    return {
        "failures": [str(failure) for failure in sorted(case.failures)],
        "like" if exact else "drawn": case.n_like,
        "survivors": cost.survivors,
        "largest_part": cost.largest,
        "gst": None if cost.gst is None else float(cost.gst),
        "bound": None if cost.bound is None else float(cost.bound),
    }


def _show(surveyed: Survey, weighed: Expected | None, seconds: float) -> None:
    console = Console(markup=False)
    title = f"{surveyed.fabric}: what any failures cost ({seconds:.1f} s)"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("dead", "sets", "connected", "mean", "50 %", "90 %", "99 %", "most", "÷ bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in surveyed.rows:
        over = row.most_over_bound
        table.add_row(
            str(row.n_failures),
            f"{row.n_sets}" if row.exact else f"{row.n_counted} of\n{_short(row.n_sets)}",
            _percent(row.connected, row.exact),
            _interval(row.mean, row.exact),
            *(_time(row.quantile(share)) for share in _QUANTILES),
            "-" if over is None else f"{over:.3f}",
        )
    print_table(table, console)
    console.print("Times of the survivors in T = P/B; the last column: the largest ratio to a proved bound.")
    alike = likeness(surveyed.fabric)
    like = "Of sets that are alike one is planned; times of the others may differ by 1 %."
    console.print(
        "All sets of as many servers, links and switches are equally likely.",
        *([like] if alike.compares(1) else []),
    )
    if isinstance(surveyed.fabric.wiring, FatTree):
        console.print("Switches inside the Fat-Tree are not among them.")
    for row in surveyed.rows[1:]:
        compared = alike.compares(row.n_failures)
        worst = (_worst(case, row, compared) for case in row.worst(_WORST))
        console.print(f"worst with {row.n_failures} dead:", *worst, sep="\n  ", soft_wrap=True)
    if weighed is not None:
        span = _span(weighed.low, weighed.high)
        console.print(f"expected bandwidth: {span} B ({weighed.healthy:.4f} B with all alive)")
        console.print(f"survivors connected: at least {weighed.connected:.5%} of the time")
        console.print(f"more dead than was looked at: {weighed.unknown:.2g} of the time")
    console.print()


def _worst(case: Case, row: Row, compared: bool) -> str:
    names = ", ".join(str(failure) for failure in sorted(case.failures))
    like = f"{case.n_like} like this" if case.n_like > 1 else "no other like this"
    if not row.exact:
        like = f"{case.n_like} like this of {row.n_counted} drawn"
    ending = f" ({like})" if compared else ""
    if case.cost.gst is None:
        return f"{names}: falls apart, {case.cost.largest} of {case.cost.survivors} stay together{ending}"
    return f"{names}: {_time(float(case.cost.gst))} T, {case.cost.survivors} survivors{ending}"


def _time(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _short(number: int) -> str:
    return str(number) if number < 10**7 else f"{float(number):.1e}"


def _percent(share: Interval, exact: bool) -> str:
    text = f"{share.value:.2%}"
    return text if exact else f"{text}\n{share.low:.0%}-{share.high:.0%}"


def _interval(mean: Interval | None, exact: bool) -> str:
    text = _time(None if mean is None else mean.value)
    return text if exact or mean is None else f"{text}\n±{(mean.high - mean.low) / 2:.3f}"


def _span(low: float, high: float) -> str:
    return f"{low:.4f}" if f"{low:.4f}" == f"{high:.4f}" else f"{low:.4f} to {high:.4f}"


def _cumulated(row: Row) -> list[tuple[float, float]]:
    """Return each time that sets take, in order, with the percentage of all sets that take no longer."""
    shares: dict[float, float] = {}
    for case in row.cases:
        if case.cost.gst is not None:
            time = float(case.cost.gst)
            shares[time] = shares.get(time, 0.0) + 100 * case.n_like / row.n_counted
    times = sorted(shares)
    reached = zip(times, accumulate(shares[time] for time in times), strict=True)
    return [*((time, 0.0) for time in times[:1]), *reached]


def _draw(surveys: Sequence[Survey], target: Path) -> str:
    """Draw, for each number of failures, the share of all sets that have at most a given time."""
    figure, axes = plot.pyplot().subplots(
        1, len(surveys), figsize=(5.2 * len(surveys), 4), layout="constrained", squeeze=False, sharey=True
    )
    for ax, surveyed in zip(axes[0], surveys, strict=True):
        steps = [(f"{row.n_failures} failures", _cumulated(row)) for row in surveyed.rows]
        right = max((times[-1][0] for _, times in steps if times), default=0.0)
        for label, times in steps:
            if times:
                ax.step(*zip(*times, (1.02 * right, times[-1][1]), strict=True), where="post", label=label)
        ax.set(title=str(surveyed.fabric), xlabel="time of the survivors (T)")
        ax.grid(alpha=0.3)
        ax.legend()
    axes[0][0].set(ylabel="sets with at most this time (%)")
    figure.savefig(target, dpi=120)
    plot.pyplot().close(figure)
    return f"drawn into {target}"
