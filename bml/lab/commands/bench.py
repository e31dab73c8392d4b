"""`bml bench`: times allreduce beside Gloo and OpenMPI, and measures the constants of this machine."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bml import fabric as emulated
from bml.cli.output import current
from bml.cli.printed import check_writable, strict_json, write_file
from bml.cli.tables import print_table
from bml.cli.values import FiniteRange, check_with
from bml.cluster.spec.constants import (
    constants_of_emulated,
    constants_of_one_host,
    default_path,
    load_constants,
    store_constants,
)
from bml.cluster.spec.job import JobSpec
from bml.lab.bench import plot as picture
from bml.lab.bench import rows
from bml.lab.bench.calibration import Calibration
from bml.lab.bench.calibration import calibrate as measure_constants
from bml.lab.bench.contenders import PEERS, JobSettings
from bml.lab.bench.contest import Contest, OnProgress, Settings, contest
from bml.lab.bench.rows import Row
from bml.lab.commands.quantities import parse_bytes
from bml.lab.commands.testbed.progress import progress, warn_if_busy
from bml.lab.commands.testbed.room import check_room
from bml.lab.commands.testbed.train import train
from bml.schedule import Schedules, plan
from bml.schedule.select.model import Constants
from bml.topology import UsageError, parse
from bml.transport.choice import AUTO, TRANSPORTS

_UNITS_OF_CONSTANTS = {
    "alpha_s": ("start-up of a message", 1e6, "µs"),
    "beta_s": ("bytes over one NIC", 1e9, "ns/B"),
    "gamma_s": ("arithmetic of a reduction", 1e9, "ns/B"),
    "delta_s": ("access to memory", 1e9, "ns/B"),
    "epsilon_s": ("incast: several senders, one receiver", 1e9, "ns/B"),
}
_CONSTANTS_HELP = "File of the cost model's constants. [default: the one that bml plan reads]"
_JSON_HELP = "Print one JSON object and nothing else."


@click.group(invoke_without_command=True)
@click.option("--calibrate", "calibrating", is_flag=True, help="Do what `bml bench calibrate` does.")
@click.option("--constants", type=click.Path(dir_okay=False, path_type=Path), help=_CONSTANTS_HELP)
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
@click.pass_context
def bench(ctx: click.Context, calibrating: bool, constants: Path | None, as_json: bool) -> None:
    """Measure this machine, and time allreduce on it.

    \b
    Example:
      bml bench --calibrate
      bml bench allreduce --fabric bcube:3x2 --against gloo,openmpi
      bml bench train --model vgg19
    """
    if calibrating and ctx.invoked_subcommand is None:
        ctx.invoke(calibrate, constants=constants, as_json=as_json)
    elif ctx.invoked_subcommand is None:
        if as_json:
            raise click.UsageError("give --calibrate, or a command such as allreduce")
        click.echo(ctx.get_help())
        ctx.exit(0)
    elif calibrating or constants or as_json:
        raise click.UsageError(f"give these options after {ctx.invoked_subcommand}")


@bench.command()
@click.option("--constants", type=click.Path(dir_okay=False, path_type=Path), help=_CONSTANTS_HELP)
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def calibrate(constants: Path | None, as_json: bool) -> None:
    """Measure the constants of the cost model.

    Plain processes of this machine send to each other. The constants are stored in a file for `bml plan` and
    for jobs.

    \b
    Example:
      bml bench calibrate
      bml plan bcube:4x2 --bytes 16KiB
    """
    with progress() as on_progress:
        warn_if_busy()
        found = measure_constants(on_progress)
    stored = store_constants(found.constants, constants)
    if as_json:
        current().answer(_calibration_json(found, stored))
    else:
        _show_calibration(found, stored)


@bench.command()
@click.option("--fabric", default="bcube:3x2", show_default=True, help="Such as bcube:3x2 or switch:9.")
@click.option("--fabric-emulated", is_flag=True, help="On the fabric of `bml fabric up`, with real cables.")
@click.option("--fabric-name", default=emulated.DEFAULT_NAME, show_default=True, help="Name of that fabric.")
@click.option(
    "--sizes", default="4KiB,64KiB,1MiB,16MiB,64MiB", show_default=True, help="Sizes of the vector."
)
@click.option(
    "--transport",
    type=click.Choice((*TRANSPORTS, AUTO)),
    default="tcp",
    show_default=True,
    help="verbs: RDMA; shm: the memory of this host; auto: what a job takes by itself.",
)
@click.option("--shared", is_flag=True, help="With shm: read results in place, without a copy.")
@click.option("--algorithm", default="auto", show_default=True, help="See bml plan.")
@click.option("--fail", multiple=True, metavar="X", help="server:4, link:4/0 or switch:0/2; repeatable.")
@click.option("--against", default="", metavar="PEERS", help=f"Some of {','.join(PEERS)}.")
@click.option(
    "--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True, help="Turns of each."
)
@click.option("--block-s", type=FiniteRange(0, 60), default=0.3, show_default=True, help="Seconds of a turn.")
@click.option("--constants", type=click.Path(dir_okay=False, path_type=Path), help=_CONSTANTS_HELP)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a .png, .svg or .pdf.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what servers did when, for Perfetto.",
)
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
@click.pass_context
def allreduce(
    ctx: click.Context,
    fabric: str,
    fabric_emulated: bool,
    fabric_name: str,
    sizes: str,
    transport: str,
    shared: bool,
    algorithm: str,
    fail: tuple[str, ...],
    against: str,
    repetitions: int,
    block_s: float,
    constants: Path | None,
    plot: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Time allreduce on every server of a fabric.

    It is a sum of float32. All servers are processes of this machine. bml and its peers take turns, so that
    other load hits all alike, and each checks every element on every server. Columns beyond nccl-tests:

    \b
    theory   time by the cost model; on an emulated fabric, bytes over goodput;
             of a peer, the time of a ring over one NIC
    ratio    measured time over theory
    /bound   measured time over the proved lower bound of all schedules of
             trees on these links, without start-ups
    speedup  time of the peer over the time of bml
    cpu      processor time of all servers together; kernel: the part of it in
             the kernel; cpu/B: per byte of the vector; /own: that of the
             peer over that of bml
    copies   copies of a byte in bml's processes: sent / received

    On an emulated fabric each peer has one NIC, on one switch, at the rate that `bml fabric up
    --one-switch-rate` gave it. With shm, theory is still that of links, although no byte passes over them.

    \b
    Example:
      bml bench allreduce --fabric bcube:3x2 --against gloo,openmpi
      bml bench allreduce --fabric bcube:3x2 --fail server:4 --json
    """
    check_with("fabric_emulated", "emulated fabrics", "fabric_name")
    start_s = time.monotonic()
    where = fabric_name if fabric_emulated else None
    job = replace(_job(fabric, fail, algorithm, where, transport, shared), trace=trace is not None)
    known, goodputs, source = _theory(job, constants)
    settings = Settings(
        job, rows.sizes(sizes, parse_bytes), _peers(against), known, repetitions, block_s, *goodputs
    )
    largest = max(settings.sizes)  # of which each server has at least two
    vectors = f"vectors of {rows.size_text(largest)}"
    check_room(len(job.fabric.servers), 2 * largest, vectors, "give smaller --sizes")
    _check_files(plot, trace)
    found = _measure(settings, printing=not as_json)
    _write_files(found, plot, trace)
    for who, why in found.running.absent.items():
        click.echo(f"{who} did not take part: {why}", err=True)
    if as_json:
        current().answer({**_answer(found, source), "seconds": round(time.monotonic() - start_s, 3)})
    else:
        click.echo(f"# {_title(found)}; theory by {source}")
    if any(row.wrong for row in found.rows):
        ctx.exit(1)


@dataclass(frozen=True)
class _Found:
    """The rows that were measured, and the contest that is over."""

    rows: list[Row]
    running: Contest


def _measure(settings: Settings, printing: bool) -> _Found:
    """Run the contest; with `printing` show the rows of every size as soon as they are there."""
    table: list[Row] = []
    with progress() as on_progress:
        warn_if_busy()
        with contest(settings, on_progress) as running:
            for number, group in enumerate(running.measure()):
                table += group
                if printing:
                    _print_rows(group, first=number == 0, on_progress=on_progress)
    return _Found(table, running)


def _title(found: _Found) -> str:
    job, used = found.running.settings.job, found.running.transport
    title = f"allreduce on {job.fabric}, {len(job.fabric.servers)} servers, {used}"
    return title if used == job.transport else f"{title} (asked for {job.transport})"


def _answer(found: _Found, source: str) -> dict[str, Any]:
    """Return the answer to --json, without the seconds that it took."""
    job, running = found.running.settings.job, found.running
    return {
        "fabric": job.fabric.name,
        "failures": [str(each) for each in sorted(job.fabric.failures)],
        "servers": len(job.fabric.servers),
        "algorithm": _algorithms(running.settings, running.transport),
        "transport": running.transport,
        "theory": source,
        "rows": [row.as_json() for row in found.rows],
        "absent": running.absent,
        **_machine(),
    }


def _check_files(plot: Path | None, trace: Path | None) -> None:
    """Raise UsageError, before the contest, if a file that is asked for cannot be written."""
    if plot is not None:
        picture.check(plot)
    check_writable(plot, "--plot")
    check_writable(trace, "--trace")


def _write_files(found: _Found, plot: Path | None, trace: Path | None) -> None:
    if trace is not None:
        write_file(trace, strict_json(found.running.trace()))
    if plot is not None:
        picture.plot(found.rows, _title(found), plot)


def _job(
    fabric: str,
    fail: tuple[str, ...],
    algorithm: str,
    network: str | None,
    transport: str,
    shared: bool,
) -> JobSettings:
    wanted = parse(fabric).without(*fail)
    plan(wanted, algorithm)  # raises what is wrong with them before any process starts
    if len(wanted.servers) < 2:
        raise UsageError(f"{wanted} has fewer than two servers: there is nothing to measure")
    if shared and transport != "shm":
        raise UsageError("results are shared in memory only: give --transport shm with --shared")
    settings = JobSettings(wanted, algorithm, network, transport=transport, shared=shared)
    JobSpec(wanted.name, algorithm, settings.faults, emulated=network, transport=transport)
    return settings


def _algorithms(settings: Settings, transport: str) -> str:
    """Return the algorithms that the steps of these sizes take, those of small ones first."""
    if transport == "shm":
        return "direct"
    made = Schedules(settings.job.fabric, settings.job.algorithm, settings.constants)
    return ", ".join(dict.fromkeys(made.for_nbytes(nbytes).algorithm for nbytes in sorted(settings.sizes)))


def _peers(against: str) -> tuple[str, ...]:
    peers = tuple(dict.fromkeys(part.strip() for part in against.split(",") if part.strip()))
    for who in peers:
        if who not in PEERS:
            raise UsageError(f"there is no peer '{who}': give some of {', '.join(PEERS)}")
    return peers


def _theory(
    job: JobSettings, constants: Path | None
) -> tuple[Constants, tuple[float | None, float | None], str]:
    """Return the constants, the goodput in bytes/s of our NICs and of peers', if known, and the source."""
    known, source = load_constants(constants)
    if job.emulated is None:
        return constants_of_one_host(known, job.fabric.n_servers), (None, None), source
    status = emulated.use(job.emulated).status()
    rate, one_switch = status["rate"], status["one_switch_rate"]
    goodputs = rate / 8 * emulated.GOODPUT, one_switch / 8 * emulated.GOODPUT
    text = f"goodput of {emulated.rate_text(rate)} a NIC"
    known = constants_of_emulated(known, goodputs[0], job.fabric.n_servers)
    return known, goodputs, text + f", peers with one of {emulated.rate_text(one_switch)}"


def _print_rows(group: list[Row], first: bool, on_progress: OnProgress) -> None:
    on_progress("printing")
    if first:
        click.echo(rows.heading())
    for row in group:
        click.echo(rows.line(row))


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}


def _calibration_json(found: Calibration, stored: Path) -> dict[str, Any]:
    samples = [
        {
            "what": sample.what,
            "measured_s": round(sample.seconds, 9),
            "model_s": round(sample.work.seconds(found.constants), 9),
        }
        for sample in found.samples
    ]
    return {
        "constants": {name: float(f"{value:.4g}") for name, value in asdict(found.constants).items()},
        "samples": samples,
        "stored": str(stored),
        **_machine(),
        "seconds": round(found.seconds, 3),
    }


def _show_calibration(found: Calibration, stored: Path) -> None:
    console = Console(markup=False, highlight=False)
    constants = Table("constant", "price of", "measured here", title="constants")
    for name, value in asdict(found.constants).items():
        what, factor, unit = _UNITS_OF_CONSTANTS[name]
        constants.add_row(name, what, f"{value * factor:.4g} {unit}")
    print_table(constants, console)
    samples = Table("experiment", "median", "by the model", "off by", title="fitted to")
    for sample in found.samples:
        model_s = sample.work.seconds(found.constants)
        off = f"{(model_s / sample.seconds - 1) * 100:+.0f} %"
        samples.add_row(sample.what, f"{sample.seconds * 1e6:.1f} µs", f"{model_s * 1e6:.1f} µs", off)
    print_table(samples, console)
    used = "bml plan --bytes uses them" if stored == default_path() else f"use them with --constants {stored}"
    console.print(f"measured in {found.seconds:.1f} s, stored in {stored}: {used}", soft_wrap=True)


bench.add_command(train)
