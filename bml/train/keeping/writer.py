"""Writes this server's part of a checkpoint, in a thread of its own, from a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from bml.train.keeping.files import Files
from bml.train.keeping.parts import UNFINISHED, Header, Key, digest, head_of, span, superseded
from bml.train.snapshot import Snapshot


class Writer:
    """The parts of one server; one is written at a time, so one copy is enough."""

    def __init__(self, files: Files, server: int, keep: int):
        self.written = 0
        """After which step the newest part that is on the disk was made; 0 before the first."""
        self.whole: list[Key] = []
        """The newest checkpoints that are whole, as all servers have agreed."""
        self.base = 0
        """The step of the checkpoint with which this job went on."""
        self.error = ""
        """Why the newest part could not be written; empty if it was."""
        self._untold = ""
        self._files, self._server, self._keep = files, server, keep
        self._written_at_s: float | None = None
        self._memory = np.empty(0, np.uint8)
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a part is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, key: Key, part: int, snapshot: Snapshot) -> None:
        """Copy a part of a snapshot, and begin to write it. No other may be under way."""
        if snapshot.refusal:
            self._fail(snapshot.refusal)
            return
        start, stop = span(len(snapshot), part, key.n_parts)
        copy = self._copied(snapshot, start, stop)
        arguments = (key, part, len(snapshot), digest(snapshot.head), copy)
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="bml-checkpoint", daemon=True
        )
        self._thread.start()

    def write(self, key: Key, snapshot: Snapshot) -> None:
        """Write a checkpoint of a single part, after the one that is under way, unless another server has."""
        self.wait()
        if key.file(0) not in self._names():
            self.begin(key, 0, snapshot)
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def shown(self) -> dict[str, Any]:
        """What the status and the report say of the checkpoints; any thread may ask."""
        at_s = self._written_at_s
        return {
            "whole": self.whole[-1].steps if self.whole else 0,
            "written": self.written,
            "age_s": None if at_s is None else round(time.monotonic() - at_s, 3),
            "error": self.error,
        }

    def news(self) -> str:
        """A warning that was not given yet; empty if there is none."""
        text, self._untold = self._untold, ""
        return text

    def _copied(self, snapshot: Snapshot, start: int, stop: int) -> memoryview:
        if len(self._memory) < stop - start:
            self._memory = np.empty(stop - start, np.uint8)
        at = 0
        for piece in snapshot.pieces(start, stop):
            self._memory[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        return self._memory[:at].data

    def _write(self, key: Key, part: int, nbytes: int, state: bytes, copy: memoryview) -> None:
        header = Header(key.steps, key.job, key.n_parts, part, nbytes, state, digest(copy))
        name = key.file(part)
        unfinished = f"{name}.{self._server}{UNFINISHED}"
        try:
            self._remove(superseded(self._files.names(), key.job, self.base, self.whole, self._keep))
            self._files.write(unfinished, (head_of(header), copy))
            self._files.rename(unfinished, name)
        except OSError as error:
            self._fail(f"server {self._server} could not write its part: {error}")
            with suppress(OSError):  # if the disk is gone, a later job removes the file
                self._files.remove(unfinished)
        else:
            self.written, self._written_at_s, self.error = key.steps, time.monotonic(), ""

    def _names(self) -> list[str]:
        try:
            return self._files.names()
        except OSError:
            return []  # writing will say why

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._files.remove(name)

    def _fail(self, why: str) -> None:
        if why != self.error:
            self._untold = f"there is no new checkpoint: {why}; the training goes on"
        self.error = why
