"""`bml replay`: runs the cores of a job's servers again on what they recorded, and tells why a part went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bml.cli.output import current
from bml.cli.tables import print_table
from bml.errors import UsageError
from bml.protocol.record.recording import Recording, unpack
from bml.protocol.record.replay import Replayed
from bml.protocol.record.story import Told, explain, tell, view_lines
from bml.protocol.record.values import RecordingError


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--explain", "part", metavar="PART", help="Say why it went: server:4, link:4/0 or switch:0/2.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def replay(file: Path, part: str | None, as_json: bool) -> None:
    """Replay the recording of a job.

    The cores of all servers take the same inputs again, and must come to the same states, bit for bit. The
    exit status is 1 if one does not: then it ran with another version of bml, or something is not recorded.

    \b
    Example:
      bml run examples/train_digits.py --fault kill:4@step=20 --record job.bmlrec
      bml replay job.bmlrec
      bml replay job.bmlrec --explain server:4
    """
    recording = load(file)
    try:
        told = tell(recording)
    except RecordingError as error:
        raise RecordingError(f"{file}: {error}") from None
    story = explain(told, part) if part is not None else view_lines(told)
    if as_json:
        current().answer(_answer(recording, told, story))
    else:
        _show(recording, told, story, whole=part is None)
    if not all(each.equal for each in told.replays):
        raise click.exceptions.Exit(1)


def load(file: Path) -> Recording:
    """Read a recording. Raises UsageError, which names the file and what is wrong with it."""
    try:
        return unpack(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except RecordingError as error:
        raise RecordingError(f"{file}: {error}") from None


def _answer(recording: Recording, told: Told, story: list[str]) -> dict[str, Any]:
    return {
        "job": recording.job,
        "fabric": recording.fabric,
        "version": recording.version,
        "equal": all(each.equal for each in told.replays),
        "servers": [
            {
                "server": each.server,
                "incarnation": each.incarnation,
                "why": one.why,
                "inputs": each.inputs,
                "equal": each.equal,
                "states": [state._asdict() for state in each.checked],
            }
            for one, each in zip(recording.servers, told.replays, strict=True)
        ],
        "story": story,
    }


def _show(recording: Recording, told: Told, story: list[str], whole: bool) -> None:
    console = Console(markup=False, highlight=False)
    if whole:
        console.print(f"job {recording.job} on {recording.fabric}, recorded by bml {recording.version}")
        table = Table(title=f"replay of {len(told.replays)} servers")
        for heading in ("server", "taken", "inputs", "states", "last state", "result"):
            table.add_column(heading)
        for one, each in zip(recording.servers, told.replays, strict=True):
            table.add_row(*_row(one.why, each))
        print_table(table, console)
    for line in story:
        console.print(line, soft_wrap=True)
    for each in told.replays:
        for state in each.checked:
            if state.differs:
                click.echo(f"server {each.server}, segment {state.segment}: {state.differs}", err=True)


def _row(why: str, each: Replayed) -> tuple[str, ...]:
    name = f"{each.server}" if not each.incarnation else f"{each.server}, incarnation {each.incarnation}"
    result = "bit-equal" if each.equal else "DIFFERS"
    return name, why, str(each.inputs), str(len(each.checked)), each.checked[-1].digest, result
