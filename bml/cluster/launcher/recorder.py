"""Gathers the recordings of a job's servers into one file.

A server keeps its recording in its own memory. With a file to write, the launcher asks all servers for theirs
at every view change, and writes what it has then: so the recordings of servers that die later are there, and
those of all if the launcher is killed. At the end servers bring theirs with their reports.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bml.cluster.fleets.fleet import Answers, Patience
from bml.cluster.spec.job import JobSpec, Request
from bml.errors import FabricError
from bml.protocol.record.recording import pack, who_of

_LOG = logging.getLogger(__name__)

SUFFIX = ".bmlrec"
MOST_FILES = 10
"""Recordings that stay in the user's folder; older ones are removed."""
_PATIENCE = Patience(5.0)
"""A server packs for a tenth of a second, and longer on a loaded machine; a frozen one never answers."""

Ask = Callable[[Request, Patience], Answers]


class Recorder:
    """The recordings of a job. `path`: the file to keep up to date; None: none is written unasked."""

    def __init__(self, spec: JobSpec, ask: Ask, path: Path | None):
        self.spec = spec
        self.path = path
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
        version = importlib.metadata.version("bml")
        return pack(self.spec.job, self.spec.fabric, version, parts) if parts else b""

    def add(self, part: bytes) -> None:
        """A server has brought its recording, or nothing."""
        if part:
            with self._lock:
                self._parts[who_of(part)] = part

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

        Raises FabricError if no server answers, or it cannot be written.
        """
        answers = self._ask(("record", why), _PATIENCE)
        for answer in answers.values():
            self.add(answer.get("recording", b""))
        if not answers:
            raise FabricError("no server has answered with its recording")
        file = path or self.path or own_file(self.spec.job)
        write(file, self.data)
        return {"file": str(file), "job": self.spec.job, "servers": sorted(answers)}

    def close(self) -> None:
        """Write the file for the last time, if there is one; the job is over. Never raises."""
        if self._asking is not None:
            self._asking.join(_PATIENCE.all_s)
        try:
            if self.path is not None and self.data:
                write(self.path, self.data)
        except FabricError as error:
            _LOG.warning("%s", error)

    def _dump(self) -> None:
        done = 0
        while done < self._epoch:
            done = self._epoch
            try:
                self.dump(f"view {done}")
            except FabricError as error:
                _LOG.warning("no recording at view %d: %s", done, error)


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
    """Write a file, whole or not at all. Raises FabricError."""
    opening = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        opening.write_bytes(data)
        opening.replace(path)
    except OSError as error:
        opening.unlink(missing_ok=True)
        raise FabricError(f"the recording cannot be written to {path}: {error.strerror}") from None
