"""Writes this server's part of a checkpoint, in a thread of its own, from a copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from bml.io.interruptible import Event
from bml.protocol.server.transfer import check_sum
from bml.train.keeping.files import Files
from bml.train.keeping.owner import claim, former, owner
from bml.train.keeping.parts import UNFINISHED, Header, Key, by_key, digest, head_of, span, superseded
from bml.train.keeping.resuming import is_whole
from bml.train.snapshot import Snapshot

_WORTH_NBYTES = 1 << 20
"""Memory for smaller parts is made at once."""
_MORE_NBYTES = 1 << 16
_CLOSING_S = 20.0
"""How long a part may take that is being written when the training ends: it may be that it never is."""
_SUMMED_NBYTES = 1 << 18
"""Of so many bytes of the state servers compare a sum."""


class Writer:
    """The parts of one server; one is written at a time, so one copy is enough."""

    def __init__(self, files: Files, server: int, keep: int):
        self.written = 0
        """After which step the newest part that is on the disk was made; 0 before the first."""
        self.whole: list[Key] = []
        """The newest checkpoints that are whole, as all servers have agreed."""
        self.dropped: list[Key] = []
        """The newest that are not whole and never will be, as all servers have agreed."""
        self.digest = 0
        """Of the state of which a part was written last: a number that states that differ do not share."""
        self.base = 0
        """The step of the checkpoint with which this job went on."""
        self.error = ""
        """Why the newest part could not be written; empty if it was."""
        self._untold = ""
        self._is_claimed = True
        self._files, self._server, self._keep = files, server, keep
        self._read_whole: set[Key] = set()
        """Checkpoints of one part that were read, and are whole."""
        self._written_at_s: float | None = None
        self._memory = np.empty(0, np.uint8)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_idle = Event()
        self._is_idle.set()
        self._is_late = False
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a part is being written, or memory for it is made."""
        return not self._is_idle.is_set()

    def prepare(self, nbytes: int) -> None:
        """Begin to make memory for a part: the first use of memory takes many times as long as a copy."""
        if nbytes >= _WORTH_NBYTES and not self.is_busy:
            self._begin(partial(self._make_memory, nbytes))

    def claim(self, job: str) -> None:
        """Note that the folder is this job's from here on, or do it before the first part is written."""
        self._is_claimed = False
        claim(self._files, job)
        self._is_claimed = True

    def begin(self, key: Key, part: int, snapshot: Snapshot) -> None:
        """Copy a part of a snapshot, and begin to write it. No other may be under way."""
        if snapshot.refusal:
            self.fail(snapshot.refusal)
            return
        start, stop = span(len(snapshot), part, key.n_parts)
        try:
            copy = self._copied(snapshot, start, stop)
        except MemoryError:
            self.fail(f"server {self._server} has no memory for a copy of {stop - start} bytes")
            return
        sampled = check_sum(snapshot, _SUMMED_NBYTES)
        self._begin(partial(self._write, key, part, len(snapshot), snapshot.head, sampled, copy))

    def write(self, key: Key, snapshot: Snapshot) -> None:
        """Write a checkpoint of a single part, after the one that is under way, unless another server has."""
        self.wait()
        self.error = ""  # that of an older checkpoint
        names = self._names()
        if key.file(0) not in names or key in self._torn(names):
            self.begin(key, 0, snapshot)
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._is_idle.wait()

    def settle(self) -> None:
        """Wait a while until nothing is being written. Idempotent: it waits in vain once."""
        if not (self._is_late or self._is_idle.wait(_CLOSING_S)):
            self._is_late = True
            self.fail(f"the last part was not written {_CLOSING_S:g} s after the end of the training")

    def close(self) -> None:
        """Wait a while until nothing is being written, and end the thread."""
        self.settle()
        self._work.put(None)

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

    def _begin(self, work: Callable[[], None]) -> None:
        """Let the thread do something. It is kept, as the start of one may take as long as a copy."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bml-checkpoint", daemon=True)
            self._thread.start()
        self._is_idle.clear()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # such as one of the files that a user gave
                self.fail(f"server {self._server} could not write its part: {error!r}")
            finally:
                self._is_idle.set()

    def _make_memory(self, nbytes: int) -> None:
        self._memory = np.ones(nbytes + nbytes // 8 + _MORE_NBYTES, np.uint8)  # states grow a little

    def _copied(self, snapshot: Snapshot, start: int, stop: int) -> memoryview:
        if len(self._memory) < stop - start:
            self._make_memory(stop - start)
        at = 0
        for piece in snapshot.pieces(start, stop):
            self._memory[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        return self._memory[:at].data

    def _write(self, key: Key, part: int, nbytes: int, head: bytes, sampled: int, copy: memoryview) -> None:
        state = digest(head, sampled.to_bytes(4, "little"))
        header = Header(key.steps, key.job, key.n_parts, part, nbytes, state, digest(copy))
        name = key.file(part)
        unfinished = f"{name}.{self._server}{UNFINISHED}"
        try:
            if not self._is_claimed:
                self.claim(key.job)
            names = self._files.names()
            if (other := owner(names)) not in ("", key.job):
                self.fail(
                    f"the job {other} has begun to write checkpoints to the same folder, so this one ends to"
                )
                return
            torn = self._torn(names)
            # With the new one they are as many as stay, but a whole one is there until the new one is whole.
            older = max(1, self._keep - 1)
            self._remove(superseded(names, key.job, self.base, self.whole, self.dropped, older, torn))
            self._remove(former(names))
            self._files.write(name, (head_of(header), copy), unfinished)
        except OSError as error:
            self.fail(f"server {self._server} could not write its part: {error}")
            with suppress(OSError):  # if the disk is gone, a later job removes the file
                self._files.remove(unfinished)
        else:
            self.digest = int.from_bytes(state[:4], "little")
            self.written, self._written_at_s, self.error = key.steps, time.monotonic(), ""

    def _names(self) -> list[str]:
        try:
            return self._files.names()
        except OSError:
            return []  # writing will say why

    def _torn(self, names: Sequence[str]) -> set[Key]:
        """The checkpoints of one part that have a name and are not whole; on the others servers agree."""
        if self._files.names_are_whole:
            return set()
        alone = {key for key in by_key(names) if key.n_parts == 1} - self._read_whole
        torn = {key for key in alone if not is_whole(self._files, key)}
        self._read_whole |= alone - torn
        return torn

    def _remove(self, names: Sequence[str]) -> None:
        """Remove files; what cannot be removed must not keep new ones from being written."""
        for name in names:
            try:
                self._files.remove(name)
            except OSError as error:
                self._tell(f"{name} of an older checkpoint cannot be removed: {error}")

    def fail(self, why: str) -> None:
        """Say why there is no new checkpoint."""
        if why != self.error:
            self._tell(f"there is no new checkpoint: {why}; the training goes on")
        self.error = why

    def _tell(self, text: str) -> None:
        self._untold = text
