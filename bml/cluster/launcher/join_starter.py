"""Starts servers that join, in threads of their own: a start takes seconds, and on Ray tens of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from bml.errors import BmlError
from bml.io.interruptible import Event

Join = Callable[[int, int, Event], None]
"""Starts a server, see Fleet.join."""

_ENDING_S = 10.0  # how long starts that were given up may take to return


class JoinStarter:
    """Starts servers with `join`, each in a thread of its own: a start may wait long for free resources.

    One thread uses it.
    """

    def __init__(self, join: Join):
        self._join = join
        self._outcomes: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._give_up = Event()
        self._threads: list[threading.Thread] = []
        self.coming: set[int] = set()
        """The servers that are being started, or that were started since the last call of `failed`."""

    def begin(self, server: int, incarnation: int) -> None:
        """Start this server, which is not `coming`, in this incarnation."""
        self.coming.add(server)
        thread = threading.Thread(
            target=self._start, args=(server, incarnation), name=f"bml-joining-{server}", daemon=True
        )
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def failed(self) -> list[tuple[int, str]]:
        """Return the servers that could not be started since the last call, and why; bugs are raised.

        What the system refuses, such as another descriptor, is no bug: the job goes on without the newcomer.
        """
        failed = []
        while not self._outcomes.empty():
            server, error = self._outcomes.get()
            self.coming.discard(server)
            if isinstance(error, BmlError | OSError):
                failed.append((server, str(error)))
            elif error is not None:
                raise error
        return failed

    def close(self) -> None:
        """Give up all starts, and wait until they have ended, but not for ever. Idempotent.

        A start on a Ray whose head is gone may be in a call that ends with the process.
        """
        self._give_up.set()
        deadline = time.monotonic() + _ENDING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, server: int, incarnation: int) -> None:
        try:
            self._join(server, incarnation, self._give_up)
        except BaseException as error:
            self._outcomes.put((server, error))
        else:
            self._outcomes.put((server, None))
