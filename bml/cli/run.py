"""`bml run`: runs a training function on every server of a fabric, and reports what happened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bml.cli.output import current
from bml.cli.printed import check_writable, strict_json, write_file
from bml.cli.recordings.kept import dumping, keep_recording
from bml.cli.scripts import load_function
from bml.cli.summary import as_json_of, report_of, summarise
from bml.cli.values import FiniteRange, ServerRange, TrafficClass, check_with
from bml.cli.web.options import WithWeb, served, shown, web_options
from bml.cluster.fleets.placement import Reservation
from bml.cluster.launcher.callbacks import view_line
from bml.cluster.launcher.launch import KEPT_MIB, LAUNCHERS, start
from bml.cluster.launcher.result import Result
from bml.errors import BmlError, FabricError, UsageError
from bml.fabric import DEFAULT_NAME
from bml.faults import FaultPlan
from bml.topology import parse
from bml.train.keeping.settings import EVERY, KEEP, has_checkpoints
from bml.transport.choice import AUTO, TRANSPORTS

if TYPE_CHECKING:
    from bml.web.served import ServedPage

_SEEDED_STEPS = 50


@click.command(cls=WithWeb)
@click.argument("target", metavar="FILE.py[:FUNCTION]")
@click.option("--fabric", default="bcube:3x2", show_default=True, help="Such as bcube:3x2 or torus:4x2.")
@click.option(
    "--fault", "faults", multiple=True, metavar="F", help="kill:4@step=20, or a YAML file; repeatable."
)
@click.option(
    "--fault-seed", type=click.IntRange(0), help=f"Draw two faults within the first {_SEEDED_STEPS} steps."
)
@click.option(
    "--launcher",
    type=click.Choice(LAUNCHERS),
    default="ray",
    show_default=True,
    help="ray: actors, on one machine or a cluster; processes: plain processes of this machine.",
)
@click.option(
    "--address",
    help="Address of a running Ray cluster; without one a local Ray is started. [default: RAY_ADDRESS]",
)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    metavar="R=AMOUNT",
    help="What each server reserves of the Ray cluster, like GPU=1; repeatable.",
)
@click.option(
    "--topology",
    metavar="FILE",
    help="Racks of the machines of the Ray cluster, in YAML: neighbours are put into one rack.",
)
@click.option("--algorithm", default="auto", show_default=True, help="See bml plan.")
@click.option(
    "--detect-s",
    envvar="BML_DETECT_S",
    show_envvar=True,
    type=float,
    help="Seconds of silence after which a failure is suspected; it is noticed within 1.25 times as long. "
    "[default: 0.5]",
)
@click.option("--min-servers", type=int, help="Fewer survivors stop the job. [default: more than half]")
@click.option(
    "--transport",
    type=click.Choice((AUTO, *TRANSPORTS)),
    default=AUTO,
    show_default=True,
    help="shm: memory of one host; verbs: RDMA; auto: shm if all servers are on this host and nothing is "
    "asked for that needs links, else tcp.",
)
@click.option(
    "--traffic-class",
    type=TrafficClass(),
    help="Go before other jobs (urgent) or after them (bulk), where queues know classes; normal: unmarked; "
    "or a DSCP times 4. [default: BML_TRAFFIC_CLASS of each server]",
)
@click.option(
    "--servers",
    type=ServerRange(),
    help="6..9: begin as soon as six servers are there; others join when they come, nine in all.",
)
@click.option("--absent", metavar="SERVERS", default="", help="Begin without these, like 7,8; they may join.")
@click.option("--spares", type=int, default=0, help="Processes that wait to take the places of lost servers.")
@click.option("--rejoin", is_flag=True, help="Start a lost server again: it joins the running job.")
@click.option(
    "--preempt-suspects",
    is_flag=True,
    help="Take out a server or a NIC of which there is an early warning, before it fails.",
)
@click.option("--checkpoint", metavar="DIR", help="Write checkpoints to this folder, or URL.")
@click.option(
    "--every", type=click.IntRange(1), default=EVERY, show_default=True, help="Steps between checkpoints."
)
@click.option(
    "--keep", type=click.IntRange(1), default=KEEP, show_default=True, help="Checkpoints that stay."
)
@click.option(
    "--resume",
    metavar="DIR",
    help="Go on from the newest whole checkpoint of this folder; with that of --checkpoint it may be empty.",
)
@click.option(
    "--kept-mib",
    type=FiniteRange(0, min_open=True),
    default=KEPT_MIB,
    show_default=True,
    help="MiB of results that a joiner keeps while it catches up.",
)
@click.option(
    "--fabric-emulated",
    is_flag=True,
    help="In network namespaces, with real cables: on that of `bml fabric up`, or one made for the job.",
)
@click.option("--fabric-name", default=DEFAULT_NAME, show_default=True, help="Name of that fabric.")
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here, as JSON."
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what servers did when, for Perfetto.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what the servers' cores were given, for bml replay; so does SIGUSR1, and bml inject dump.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT|ray",
    help="Serve metrics to Prometheus here, on 127.0.0.1 without HOST; ray: at Ray's own endpoint.",
)
@web_options
@click.option("--quiet", is_flag=True, help="Hide what the training functions print.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object and nothing else.")
def run(
    target: str,
    fabric: str,
    faults: tuple[str, ...],
    fault_seed: int | None,
    resources: tuple[str, ...],
    absent: str,
    fabric_emulated: bool,
    fabric_name: str,
    report: Path | None,
    trace: Path | None,
    record: Path | None,
    web: int | None,
    web_inject: bool,
    quiet: bool,
    as_json: bool,
    **unchanged: Any,  # options that bml.launch takes by the same names
) -> None:
    """Run a training function on every server of a fabric.

    The function is `train` of the file if no other is named. While the job runs, every view is a line; at
    its end come the views, the lost servers, the ledger of samples, and the digest of the parameters.

    \b
    Example:
      bml run examples/train_digits.py --fabric bcube:3x2 --fault kill:4@step=20
    """
    check_with("checkpoint", "checkpoints", "every", "keep")
    check_with("fabric_emulated", "emulated fabrics", "fabric_name")
    check_writable(report, "--report")
    check_writable(trace, "--trace")
    check_writable(record, "--record")
    current().optional = not as_json
    train, texts = load_function(target), fault_texts(faults, fault_seed, fabric)
    console = Console(file=sys.stderr if as_json else sys.stdout)
    with (
        served(web, web_inject, lambda text: click.echo(text, err=as_json)) as page,
        _hidden_prints(quiet),
        _Follower(console, page) as follower,
    ):
        result, failure = _outcome(
            train,
            page,
            lambda found, ended: _shown(
                _write(report, "--report", strict_json(as_json_of(found, ended), indent=1))
            ),
            fabric=fabric,
            faults=texts,
            resources=Reservation.parse(resources).amounts,
            absent=_servers(absent),
            emulated=fabric_name if fabric_emulated else False,
            trace=trace is not None,
            record=record,
            prints=not (quiet or as_json),
            on_change=follower.changed,
            on_start=follower.starting,
            **unchanged,
        )
        # Files are written before the last line is shown, which may have to wait for a reader.
        lost = [
            *_write(trace, "--trace", strict_json(result.trace) if result and trace else None),
            *_write(report, "--report", report_of(result, failure)),
            *([f"Error: --record: {result.recording_lost}"] if result and result.recording_lost else []),
        ]
    kept = keep_recording(result, failure, record)
    if as_json:
        current().answer(as_json_of(result, failure))
    elif result is not None and failure is None:
        summarise(result, console)
    never_struck = {} if result is None else result.never_struck
    _shown([*(f"the fault {each} never struck: {why}" for each, why in never_struck.items()), *lost])
    _shown([kept] if kept else [])
    if failure is not None:
        if result is not None and has_checkpoints(unchanged["checkpoint"]):
            click.echo(f"checkpoints are in {unchanged['checkpoint']}: --resume goes on from there", err=True)
        raise failure
    if lost:
        raise click.exceptions.Exit(1)


def _write(path: Path | None, option: str, text: str | None) -> Iterator[str]:
    """Write a file. Yields a message if it cannot be written, so that the other results are not lost."""
    if path is None or text is None:
        return
    try:
        write_file(path, text)
    except FabricError as error:
        yield f"Error: {option} {error}"


def _shown(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


def _outcome(
    train: Callable[..., Any],
    page: ServedPage | None,
    interrupted: Callable[[Result | None, BaseException], None],
    **settings: Any,
) -> tuple[Result | None, BmlError | None]:
    """Launch the job; return its result, and its error if it failed. Raises errors of before its start.

    `interrupted` is given what is known of a job that Ctrl-C or a signal has ended, and with what.
    """
    try:
        with start(train, **settings) as job, dumping(job), shown(page, job):
            return job.wait(), None
    except (KeyboardInterrupt, SystemExit) as ends:
        interrupted(getattr(ends, "result", None), ends)
        raise
    except BmlError as error:
        if page is not None:
            page.fail(error)
        result: Result | None = getattr(error, "result", None)
        if result is None and isinstance(error, UsageError):
            raise
        return result, error


def _servers(text: str) -> list[int]:
    """Parse the numbers of servers in `7,8`."""
    try:
        return [int(each) for each in text.split(",") if each.strip()]
    except ValueError:
        raise UsageError(f"'{text}' is not a list of servers: give numbers like 7,8") from None


def fault_texts(faults: tuple[str, ...], seed: int | None, fabric: str) -> list[str]:
    """Return the faults as texts: those that are given, those of YAML files, and those drawn from a seed."""
    texts: list[str] = []
    for fault in faults:
        if fault.endswith((".yaml", ".yml")):
            texts += [str(each) for each in FaultPlan.load(_read(fault))]
        else:
            texts.append(fault)
    if seed is not None:
        texts += [str(each) for each in FaultPlan.draw(seed, parse(fabric), _SEEDED_STEPS)]
    return texts


def _read(file: str) -> str:
    """Read the file of a fault plan. Raises UsageError if it cannot be read."""
    try:
        return Path(file).read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no fault plan {file}") from None
    except OSError as error:
        raise UsageError(f"the fault plan {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the fault plan {file} is not text in UTF-8: {error.reason}") from None


@contextmanager
def _hidden_prints(hide: bool) -> Iterator[None]:
    """Send this process's standard output to nowhere: Ray prints to it what it says of the cluster."""
    if not hide:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


class _Follower:
    """Shows the job's state while it runs: a line per view, and a spinner with the step."""

    def __init__(self, console: Console, page: ServedPage | None):
        self._console, self._page = console, page
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting the servers")
        self._epoch = 0

    def __enter__(self) -> _Follower:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def starting(self, what: str) -> None:
        """Show what is being started, if that takes long."""
        self._progress.update(self._task, description=what)
        if self._page is not None:
            self._page.say(what)
        if not self._console.is_terminal:
            self._console.print(what, highlight=False, markup=False)

    def changed(self, now: dict[str, Any]) -> None:
        """Show a snapshot of the coordinator."""
        if now["epoch"] > self._epoch:
            self._epoch = now["epoch"]
            self._progress.console.print(view_line(now), highlight=False, markup=False)
        self._progress.update(
            self._task, description=f"step {now['step']}, {len(now['members'])} servers, {now['state']}"
        )
