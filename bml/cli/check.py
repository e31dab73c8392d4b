"""`bml check`: simulates the protocol under faults from seeds, and checks its promises at every event."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bml.cli.output import current
from bml.io.workers import finished, workers
from bml.sim.check import Tally, check, report
from bml.sim.programs.check import check as check_program
from bml.sim.programs.check import check_all
from bml.topology import UsageError, parse

_CHUNK = 10
_SHOWN = 5
_MOST_SEEDS = 10_000_000


@click.command(name="check")
@click.option("--seeds", default="0:1000", show_default=True, metavar="A:B", help="Seeds A to B-1.")
@click.option("--fabric", metavar="F", help="Simulate this fabric. [default: small ones in turn]")
@click.option("--shared-memory", is_flag=True, help="The servers share one host, as with the transport shm.")
@click.option("--programs", is_flag=True, help="Run random training programs on a simulated job instead.")
@click.option("--jobs", type=click.IntRange(1), help="Processes to use. [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.pass_context
def check_command(
    ctx: click.Context,
    seeds: str,
    fabric: str | None,
    shared_memory: bool,
    programs: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Simulate the protocol under faults and check its promises.

    Every seed is one run: a few servers, a coordinator, and crashes, freezes, dead NICs and switches,
    partitions and lost connections at moments that the seed decides. If a seed breaks a promise, it is shown
    on standard error at once. It is run again with as few faults as still break the promise, and that history
    is printed. Ctrl-C ends the run with a summary of the seeds so far.

    With --programs every seed is a training function, right or wrong, that runs on the real session among
    servers that die, leave and join. It must end with the numbers of the same function on one process without
    faults, or with an error that names its mistake. Seeds that do not are printed.

    \b
    Example:
      bml check --seeds 0:1000
      bml check --seeds 77:78 --fabric bcube:3x2
      bml check --programs --seeds 0:2000
    """
    start, stop = parse_seeds(seeds)
    if programs and (fabric is not None or shared_memory):
        raise UsageError("--programs simulates no fabric: leave out --fabric and --shared-memory")
    if fabric is not None:
        parse(fabric)
    started_s = time.perf_counter()
    one = check_all if programs else partial(check, fabric=fabric, shared_memory=shared_memory)
    tally, interrupted = Tally(), False
    try:
        _run_all(tally, start, stop, one, jobs or os.cpu_count() or 1, quiet=as_json)
    except KeyboardInterrupt:
        interrupted = True
    tally.seconds = round(time.perf_counter() - started_s, 3)
    if as_json:
        keys = ("seeds", "violations", "failing_seed", "faults_injected", "steps_committed", "seconds")
        found = asdict(tally)
        current().answer({key: found[key] for key in keys})
    else:
        _show(tally)
        if tally.failing_seed is not None and not interrupted:
            click.echo("")
            seed = tally.failing_seed
            click.echo(str(check_program(seed)) if programs else report(seed, fabric, shared_memory))
    if interrupted:
        raise click.Abort
    if tally.violations:
        ctx.exit(1)


def parse_seeds(text: str) -> tuple[int, int]:
    """Parse `A:B`. Raises UsageError for another form, for no seed, and for too many seeds."""
    found = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text.strip())
    if found is None or int(found[1]) >= int(found[2]):
        raise UsageError(f"'{text}' is not a range of seeds: write A:B with A below B, like 0:1000")
    start, stop = int(found[1]), int(found[2])
    if stop - start > _MOST_SEEDS:
        raise UsageError(f"{stop - start} seeds would take weeks: give at most {_MOST_SEEDS} at a time")
    return start, stop


def _run_all(
    total: Tally, start: int, stop: int, one: Callable[[Iterable[int]], Tally], jobs: int, quiet: bool
) -> None:
    """Run all seeds and add them to `total`. A violation is shown on standard error when it is found."""
    chunks = [range(at, min(at + _CHUNK, stop)) for at in range(start, stop, _CHUNK)]
    columns = (
        TextColumn("seeds"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        task = progress.add_task("seeds", total=stop - start)
        if jobs == 1 or len(chunks) == 1:
            for seed in range(start, stop):
                _add(total, one([seed]), console)
                progress.advance(task)
            return
        with workers(min(jobs, len(chunks))) as pool:
            for done in finished([pool.submit(one, chunk) for chunk in chunks]):
                tally = done.result()
                _add(total, tally, console)
                progress.advance(task, tally.seeds)


def _add(total: Tally, tally: Tally, console: Console) -> None:
    for seed in sorted(tally.broken):
        console.print(_line(tally, seed), markup=False, highlight=False, soft_wrap=True)
    total.merge(tally)


def _line(tally: Tally, seed: int) -> str:
    return f"  seed {seed}: {tally.broken[seed].splitlines()[0]}"


def _show(tally: Tally) -> None:
    rate = tally.seeds / tally.seconds if tally.seconds else 0.0
    click.echo(
        f"{tally.seeds} seeds, {tally.faults_injected} faults, {tally.steps_committed} steps committed, "
        f"{tally.jobs_aborted} jobs ended as they must: {tally.violations} violations "
        f"({tally.seconds:.1f} s, {rate:.0f} seeds/s)"
    )
    for seed in sorted(tally.broken)[:_SHOWN]:
        click.echo(_line(tally, seed))
