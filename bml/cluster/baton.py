"""Which thread polls: the loop's own, or for the time of a step the one that waits for its result.

Whoever waits for a step polls itself, so that no step needs a switch between threads. Taking the baton wakes
nobody: the loop's thread waits for the poller through an epoll of its own, in which the poller is masked
meanwhile, and goes on waiting.
"""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

from bml.transport import forks
from bml.transport.poller import READ, Poller


class Baton:
    """Whoever holds it polls; the loop's thread rests without it until there is something to do."""

    def __init__(self, poller: Poller):
        self._fd = poller.fileno()
        self._lock = threading.Lock()
        self._outer = select.epoll()
        self._outer.register(self._fd, READ)
        forks.tell(self)

    def rest(self, timeout_s: float) -> None:
        """Wait in the loop's thread until the poller has something and nobody else polls, so long at most."""
        self._outer.poll(timeout_s, 1)

    def __enter__(self) -> None:
        """Take it in the loop's thread."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take(self) -> None:
        """Take it in another thread."""
        self._lock.acquire()
        self._watch(0)

    def give(self) -> None:
        """Give it back; the loop's thread goes on at once if there is something to do."""
        self._watch(READ)
        self._lock.release()

    def close(self) -> None:
        """Free the descriptor; by whoever holds it, before the poller is closed."""
        self._outer.close()

    def forked(self) -> None:
        """See bml.transport.forks."""
        self._outer.close()

    def _watch(self, events: int) -> None:
        if not self._outer.closed:
            self._outer.modify(self._fd, events)


Handle = Callable[[int, FrameType | None], Any]


class Deferral:
    """In a `with` block, puts off what handlers of signals do: one that raises would tear what it interrupts.

    Python runs them in the main thread, between any two of its instructions; in other threads the block does
    nothing. The end of the block raises what a handler raises. `wake` ends the waiting inside of it.
    """

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._main = threading.main_thread().ident
        self._active = False
        self._came: list[tuple[Handle, int, FrameType | None]] = []
        self._adopted: dict[int, tuple[Handle, Handle]] | None = None
        forks.tell(self)

    def forked(self) -> None:
        """A child that another thread forked in the middle of a block never comes to its end."""
        self._active = False
        self._came.clear()

    @property
    def came(self) -> bool:
        """Whether something was put off."""
        return bool(self._came)

    def __enter__(self) -> None:
        if get_ident() == self._main:
            if self._adopted is None:
                self._adopt()
            self._active = True

    def __exit__(self, *_: object) -> None:
        if get_ident() == self._main:
            self._active = False
            while self._came:
                handler, number, frame = self._came.pop(0)
                handler(number, frame)

    def close(self) -> None:
        """Give the handlers back; in the thread of the blocks."""
        adopted, self._adopted = self._adopted or {}, None
        for number, (ours, handler) in adopted.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, handler)

    def _adopt(self) -> None:
        """Take over the handlers that there are now: to look again in every step would cost more than one."""
        self._adopted = {}
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                ours = partial(self._handle, handler)
                self._adopted[number] = (ours, handler)
                signal.signal(number, ours)

    def _handle(self, handler: Handle, number: int, frame: FrameType | None) -> None:
        if not self._active:
            handler(number, frame)
            return
        self._came.append((handler, number, frame))
        self._wake()
