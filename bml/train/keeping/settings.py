"""What a launcher is asked for: which checkpoints a job makes, and with which one it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath

from bml.topology.errors import UsageError
from bml.train.keeping.files import why
from bml.train.keeping.keeper import check_number
from bml.train.keeping.parts import Key, by_key
from bml.train.keeping.resuming import (
    Resumed,
    check_lineage,
    clear_unbegun,
    newest_and_skipped,
    newest_named,
    read,
)
from bml.train.keeping.stores import files_of, place_of
from bml.train.session import Session

EVERY, KEEP = 100, 3
Path = str | PathLike[str]


@dataclass(frozen=True)
class Keeping:
    """`folder`: where checkpoints are written, "" for none; `resumed`: that of `source` to begin with.

    `skipped` says of the newest one of `source` why it is not whole, if it is not that one.
    """

    folder: str = ""
    every: int = EVERY
    keep: int = KEEP
    source: str = ""
    resumed: Key | None = None
    skipped: str = ""

    @classmethod
    def of(cls, checkpoint: Path | None, every: int, keep: int, resume: Path | None) -> Keeping:
        """Find the newest whole checkpoint of the folder `resume`.

        If both folders are the same, a job that has not come to its first checkpoint begins anew: so one
        command starts a training, and goes on with it however often it dies. What such a job left is removed.

        Raises UsageError if there is none, and if `checkpoint` is a folder with those of another job.
        """
        for name, number in (("every", every), ("keep", keep)):
            check_number(name, number)
        folder, source = _absolute(checkpoint, "checkpoint"), _absolute(resume, "resume")
        try:
            if folder and folder == source and clear_unbegun(files_of(folder), 2 * every):
                source = ""
            if folder and folder != source:
                check_lineage(files_of(folder))
            resumed, torn = newest_and_skipped(files_of(source)) if source else (None, [])
            return cls(folder, every, keep, source, resumed, torn[0] if torn else "")
        except OSError as error:
            where = error.filename or source or folder
            raise UsageError(f"checkpoints cannot be read in {where}: {why(error)}") from error

    def __str__(self) -> str:
        """How the job begins; empty if it neither makes checkpoints nor goes on from one."""
        if self.resumed is not None:
            return f"going on from {self.resumed}" + (f"; not whole: {self.skipped}" if self.skipped else "")
        return f"beginning anew, with checkpoints in {self.folder}" if self.folder else ""

    def left(self) -> str:
        """Say how to go on with the newest checkpoint in the folder; empty without one."""
        try:
            newest = newest_named(files_of(self.folder)) if self.folder else None
        except (OSError, UsageError):  # perhaps only the servers see the folder
            newest = None
        return "" if newest is None else f"{newest} is kept: go on with --resume {self.folder}"

    def apply(self, session: Session) -> None:
        """Let a session of this job go on, and make checkpoints, before its training function begins.

        A server that joins is given the others' state, not that of the checkpoint. Raises UsageError as
        `Session.checkpoint` does, and if the checkpoint cannot be read here.
        """
        if self.resumed is not None and not session.joins:
            session.resume(Resumed(self.resumed, read(files_of(self.source), self.resumed)))
        if self.folder:
            session.checkpoint(self.folder, self.every, self.keep)


NO_KEEPING = Keeping()


def has_checkpoints(folder: Path | None) -> bool:
    """Whether there are files of checkpoints in a folder; False if it cannot be read."""
    try:
        return bool(folder and by_key(files_of(folder).names()))
    except (OSError, UsageError):
        return False


def _absolute(path: Path | None, name: str) -> str:
    """The folder as all servers find it, whatever folder they work in."""
    if path is None:
        return ""
    if not isinstance(path, str | PathLike) or not (text := fspath(path)):
        raise UsageError(f"{name} is {path!r}: give a folder, or a URL such as s3://bucket/kept")
    if text.startswith("memory://"):
        raise UsageError(
            f"{name} is {text}: each process has such memory of its own, and nothing of it stays"
        )
    return place_of(text)
