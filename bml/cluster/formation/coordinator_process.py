"""The side of the rank of the process for its coordinators (bml.cluster.process.coordinator)."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bml.cluster.process.coordinator import ALIVE_EVERY_S
from bml.cluster.process.imports import what_we_import
from bml.cluster.process.mail import Outbox, receive
from bml.cluster.process.starting import SOCKET, start_with_socket
from bml.io.forks import close_whole

_ENTRY = "from bml.cluster.process import coordinator; coordinator.main()"
_MOST_UNSENT = 1000
_SILENT_TURNS, _STARTING_TURNS = 12, 240
"""For so many waits of ALIVE_EVERY_S each it may say nothing; then it is taken for stopped and is killed.
Until its first word it may take longer: it imports, perhaps on a machine that is busy."""
_MOST_DOUBLED = 3
"""A process after so many that were silent may be silent for twice as long each time: it may only be slow."""
_ENDS_S = 2.0  # how long it may take to exit once its socket has ended

Event = tuple[Any, ...]
"""("ready",); ("lost",), the process is gone; ("ended", term, by), the coordinator of the group has ended,
or was deposed by that of a higher term."""
Listener = Callable[[Event], None]
"""It only notes an event: it is called with a lock held, so that events come in their order."""


class CoordinatorProcess:
    """A process that runs coordinators of this process's groups; see `of_this_process`."""

    def __init__(self, silent_turns: int = _SILENT_TURNS) -> None:
        self._silent_turns = silent_turns
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **what_we_import()}
        # Ctrl-C is the rank's to handle.
        self._process, self._sock = start_with_socket(["-P", "-c", _ENTRY, SOCKET], environment)
        self._outbox = Outbox(self._sock, _MOST_UNSENT)
        self._changed = threading.Lock()
        self._listeners: dict[str, Listener] = {}
        self._is_ready = False
        self.is_lost = False
        """Whether the process is gone."""
        self._thread = threading.Thread(target=self._listen, name="bml-coordinators", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """The id of the process."""
        return self._process.pid

    def add(self, group: str, listener: Listener) -> None:
        """Tell a group what happens, in another thread; what has happened already is told at once."""
        with self._changed:
            self._listeners[group] = listener
            if self.is_lost:
                listener(("lost",))
            elif self._is_ready:
                listener(("ready",))

    def remove(self, group: str) -> bool:
        """Tell a group no more; returns whether no group is left."""
        with self._changed:
            self._listeners.pop(group, None)
            return not self._listeners

    def send(self, *message: Any) -> None:
        """Send a message; without effect if the process is gone."""
        self._outbox.put(*message)

    def close(self) -> None:
        """End the process, with the coordinators that still run in it. Idempotent."""
        self._outbox.close()  # it ends by itself then
        self._thread.join()

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        silent = 0
        with suppress(EOFError, OSError):
            # While this process is stopped, these waits do not go on.
            while silent < (self._silent_turns if self._is_ready else _STARTING_TURNS):
                if not poll.poll(ALIVE_EVERY_S * 1000):
                    silent += 1
                    continue
                silent = 0
                self._heard(*receive(self._sock))
        self._outbox.close()
        try:
            self._process.wait(_ENDS_S if silent < self._silent_turns else 0.0)
        except subprocess.TimeoutExpired:  # it is stopped, or slow
            _shared.n_silent += 1
            self._process.kill()
            self._process.wait()
        close_whole(self._sock)
        with self._changed:
            self.is_lost = True
            for listener in self._listeners.values():
                listener(("lost",))

    def _heard(self, what: str, *rest: Any) -> None:
        with self._changed:
            if what == "ready":
                self._is_ready = True
                for listener in self._listeners.values():
                    listener((what,))
            elif what == "ended" and rest[0] in self._listeners:
                _shared.n_silent = 0
                self._listeners[rest[0]]((what, *rest[1:]))


class _Shared:
    """The process that all groups of this process use; a process that was forked has none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: CoordinatorProcess | None = None
        self.n_silent = 0
        """How many processes were killed for their silence since a coordinator has ended well."""

    def forked(self) -> None:
        self.lock, self.process, self.n_silent = threading.Lock(), None, 0


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.forked)


def of_this_process(group: str, listener: Listener) -> CoordinatorProcess:
    """Return the process for coordinators, started if there is none, for one more group."""
    with _shared.lock:
        if _shared.process is None or _shared.process.is_lost:
            turns = _SILENT_TURNS << min(_shared.n_silent, _MOST_DOUBLED)
            _shared.process = CoordinatorProcess(turns)
        process = _shared.process
        process.add(group, listener)
    return process


def release(group: str, process: CoordinatorProcess) -> None:
    """A group needs the process no more; it ends with the last group."""
    with _shared.lock:
        if not process.remove(group):
            return
        if _shared.process is process:
            _shared.process = None
    process.close()
