"""Starts servers that join, beside everything else: that takes seconds, on Ray tens of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from bml.errors import StartError

Join = Callable[[int, int, threading.Event], None]
"""Starts a server, see Fleet.join."""


class Joining:
    """Starts one server after the other with `join`, in a thread of its own; one thread uses the rest."""

    def __init__(self, join: Join):
        self._join = join
        self._orders: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self.coming: set[int] = set()
        """The servers that are being started, or were since `failed` was asked last."""

    def begin(self, server: int, life: int) -> None:
        """Start this server, which is not `coming`, in this incarnation."""
        self.coming.add(server)
        self._orders.put((server, life))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bml-joining", daemon=True)
            self._thread.start()

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
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._give_up.is_set():
            server, life = order
            try:
                self._join(server, life, self._give_up)
            except BaseException as error:
                self._outcomes.put((server, error))
            else:
                self._outcomes.put((server, None))
