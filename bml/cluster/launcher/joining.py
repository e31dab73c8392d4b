"""Starts servers that join, beside everything else: that takes seconds, on Ray tens of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from bml.errors import StartError

Join = Callable[[int, int, threading.Event], None]
"""Starts a server, see Fleet.join."""


class Joining:
    """Starts servers with `join`, each in a thread of its own, as one may find no room for long.

    One thread uses it.
    """

    def __init__(self, join: Join):
        self._join = join
        self._outcomes: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._give_up = threading.Event()
        self._threads: list[threading.Thread] = []
        self.coming: set[int] = set()
        """The servers that are being started, or were since `failed` was asked last."""

    def begin(self, server: int, incarnation: int) -> None:
        """Start this server, which is not `coming`, in this incarnation."""
        self.coming.add(server)
        thread = threading.Thread(
            target=self._start, args=(server, incarnation), name=f"bml-joining-{server}", daemon=True
        )
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def failed(self) -> list[tuple[int, str]]:
        """The servers that could not be started since this was asked last, and why. Raises what is a bug."""
        failed = []
        while not self._outcomes.empty():
            server, error = self._outcomes.get()
            self.coming.discard(server)
            if isinstance(error, StartError):
                failed.append((server, str(error)))
            elif error is not None:
                raise error
        return failed

    def close(self) -> None:
        """Give up what is being started, and wait until it is. Idempotent."""
        self._give_up.set()
        for thread in self._threads:
            thread.join()

    def _start(self, server: int, incarnation: int) -> None:
        try:
            self._join(server, incarnation, self._give_up)
        except BaseException as error:
            self._outcomes.put((server, error))
        else:
            self._outcomes.put((server, None))
