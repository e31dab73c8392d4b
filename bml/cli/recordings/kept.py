"""The recording of a job that `bml run` runs: written when SIGUSR1 comes, and when the job fails."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bml.cluster.launcher.recorder import keep
from bml.cluster.launcher.result import Result
from bml.cluster.launcher.running import Job
from bml.errors import BmlError


@contextmanager
def dumping(job: Job) -> Iterator[None]:
    """Let SIGUSR1 write the recording of a job while it runs, in a thread of its own."""

    def dump() -> None:
        try:
            done = job.dump()
        except BmlError as error:
            click.echo(f"no recording: {error}", err=True)
        else:
            click.echo(_where(done["file"]), err=True)

    def came(number: int, frame: object) -> None:
        threading.Thread(target=dump, name="bml-dump", daemon=True).start()

    before = signal.signal(signal.SIGUSR1, came)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def keep_recording(result: Result | None, failure: BmlError | None, asked: Path | None) -> str:
    """Keep the recording of a job that failed, if it is in no file yet; returns a line that says where."""
    if result is None or not result.recording:
        return ""
    if asked is not None and not result.recording_lost:
        return _where(str(asked))
    if failure is None:
        return ""
    try:
        return _where(str(keep(result.spec.job, result.recording)))
    except BmlError as error:
        return f"no recording was kept: {error}"


def _where(file: str) -> str:
    return f"the last inputs of the servers are in {file}: bml replay shows what happened"
