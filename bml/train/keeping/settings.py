"""What a launcher is asked for: which checkpoints a job makes, and with which one it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from os.path import abspath

from bml.topology.errors import UsageError
from bml.train.keeping.files import Folder
from bml.train.keeping.keeper import check_number
from bml.train.keeping.parts import Key
from bml.train.keeping.resuming import Resumed, check_lineage, newest_whole, read
from bml.train.session import Session

EVERY, KEEP = 100, 3
Path = str | PathLike[str]


@dataclass(frozen=True)
class Keeping:
    """`folder`: where checkpoints are written, "" for none; `resumed`: that of `source` to begin with."""

    folder: str = ""
    every: int = EVERY
    keep: int = KEEP
    source: str = ""
    resumed: Key | None = None

    @classmethod
    def of(cls, checkpoint: Path | None, every: int, keep: int, resume: Path | None) -> Keeping:
        """Find the newest whole checkpoint of the folder `resume`.

        Raises UsageError if there is none, and if `checkpoint` is a folder with those of another job.
        """
        for name, number in (("every", every), ("keep", keep)):
            check_number(name, number)
        folder, source = _absolute(checkpoint, "checkpoint"), _absolute(resume, "resume")
        if folder and folder != source:
            check_lineage(Folder(folder))
        return cls(folder, every, keep, source, newest_whole(Folder(source)) if source else None)

    def apply(self, session: Session) -> None:
        """Let a session of this job go on, and make checkpoints, before its training function begins.

        A server that joins is given the others' state, not that of the checkpoint. Raises UsageError as
        `Session.checkpoint` does, and if the checkpoint cannot be read here.
        """
        if self.resumed is not None and not session.joins:
            session.resume(Resumed(self.resumed, read(Folder(self.source), self.resumed)))
        if self.folder:
            session.checkpoint(self.folder, self.every, self.keep)


NO_KEEPING = Keeping()


def _absolute(path: Path | None, name: str) -> str:
    """The folder as all servers find it, whatever folder they work in."""
    if path is None:
        return ""
    if not isinstance(path, str | PathLike) or not fspath(path):
        raise UsageError(f"{name} is {path!r}: give a folder")
    return abspath(path)
