"""Gathers the recordings of a job's servers into one file.

A server keeps its recording in its own memory. With a file to write, the launcher asks all servers for theirs
at every view change, and writes what it has then: so the recordings of servers that die later are there, and
those of all if the launcher is killed. At the end servers bring theirs with their reports.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bml.cluster.fleets.fleet import Answers, Patience
from bml.cluster.launcher.result import own_version
from bml.cluster.spec.job import JobSpec, Request
from bml.errors import FabricError, UsageError
from bml.io.files import write_whole
from bml.protocol.record.recording import pack, who_of

_LOG = logging.getLogger(__name__)

SUFFIX = ".bmlrec"
MOST_FILES = 10
"""Recordings that stay in the user's folder; older ones are removed."""
MOST_INCARNATIONS = 2
"""Of a server that comes again and again; more would fill the memory of the launcher."""
_PATIENCE = Patience(5.0)
"""A server packs for a tenth of a second, and longer on a loaded machine; a frozen one never answers."""

Ask = Callable[[Request, Patience], Answers]


class Recorder:
    """The recordings of a job. `path`: the file to keep up to date; None: none is written unasked.

    `lost` says after `close` why that file could not be written; "": it could.
    """

    def __init__(self, spec: JobSpec, ask: Ask, path: Path | None):
        self.spec = spec
        self.path = path
        self.lost = ""
        self._ask = ask
        self._parts: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()
        self._epoch = 1
        self._asking: threading.Thread | None = None

    @property
    def data(self) -> bytes:
        """The file of all that is known; empty if that is nothing."""
        with self._lock:
            parts = [self._parts[who] for who in sorted(self._parts)]
        return pack(self.spec.job, self.spec.fabric, own_version(), parts) if parts else b""

    def add(self, part: bytes) -> None:
        """A server has brought its recording, or nothing; of its incarnations the newest two stay."""
        if not part:
            return
        server, incarnation = who_of(part)
        with self._lock:
            self._parts[server, incarnation] = part
            for older in sorted(who for who in self._parts if who[0] == server)[:-MOST_INCARNATIONS]:
                del self._parts[older]

    def changed(self, epoch: int) -> None:
        """A view is in force; never waits."""
        if epoch <= self._epoch or self.path is None:
            return
        self._epoch = epoch
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._dump, name="bml-recorder", daemon=True)
            self._asking.start()

    def dump(self, why: str, path: Path | None = None) -> dict[str, Any]:
        """Ask all servers now, and write the file: `path`, else that of the job, else one in `folder()`.

        Raises FabricError if no server answers, or it cannot be written; UsageError if `path` is no file.
        """
        path = path and file_to_write(path)
        answers = self._ask(("record", why), _PATIENCE)
        parts = {server: part for server in sorted(answers) if (part := answers[server].get("recording"))}
        for part in parts.values():
            self.add(part)
        if not parts:
            raise FabricError("no server has answered with its recording")
        file = path or self.path or own_file(self.spec.job)
        write(file, self.data)
        return {"file": str(file), "job": self.spec.job, "servers": [*parts]}

    def close(self) -> None:
        """Write the file for the last time, if there is one; the job is over. Sets `lost`; never raises."""
        if self._asking is not None:
            self._asking.join(_PATIENCE.all_s)
        try:
            if self.path is not None and (data := self.data):
                write(self.path, data)
            elif self.path is not None:
                self.lost = f"no server has brought a recording for {self.path}"
        except FabricError as error:
            self.lost = str(error)
            _LOG.warning("%s", error)

    def _dump(self) -> None:
        done = 0
        while done < self._epoch:
            done = self._epoch
            try:
                self.dump(f"view {done}")
            except FabricError as error:
                _LOG.warning("no recording at view %d: %s", done, error)


def file_to_write(path: str | os.PathLike[str]) -> Path:
    """The file that a recording may replace: where links lead. Raises UsageError if that is no plain file."""
    try:
        file = Path(path).resolve()
        if not file.exists() or file.is_file():
            return file
        why = "it is a folder" if file.is_dir() else "it is no plain file"
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that is too long
        why = str(error)
    raise UsageError(f"no recording can be written to {path}: {why}; name a file, such as job.bmlrec")


def folder() -> Path:
    """The folder of this user's recordings: `$XDG_STATE_HOME/bml`, else ~/.local/state/bml."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "bml"


def own_file(job: str) -> Path:
    """A file for this job in `folder()`, where room is made for it. Raises FabricError."""
    try:
        place = folder()
        place.mkdir(parents=True, exist_ok=True)
        by_age = sorted(place.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime)
        for file in by_age[: max(0, len(by_age) + 1 - MOST_FILES)]:
            file.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        raise FabricError(f"there is no folder for recordings ({error}): set XDG_STATE_HOME") from None
    return place / f"{job}{SUFFIX}"


def keep(job: str, data: bytes) -> Path:
    """Write a recording to a file of its own; returns the file. Raises FabricError."""
    file = own_file(job)
    write(file, data)
    return file


def write(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all. Any threads may, also at the same time. Raises FabricError."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise FabricError(f"the recording cannot be written to {path}: {error.strerror}") from None
