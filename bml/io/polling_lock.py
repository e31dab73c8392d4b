"""Which thread polls: the loop's own, or for the time of a step the one that waits for its result.

A thread that waits for a step polls itself, so that no step needs a switch between threads (as in the pattern
"leader/followers"). Taking the lock wakes no thread: the loop's thread waits for the poller through an epoll
of its own, in which the poller is masked meanwhile, and goes on waiting.
"""

from __future__ import annotations

import select
import threading

from bml.io import forks
from bml.io.poller import READ, Poller


class PollingLock:
    """The thread that holds it polls; without it the loop's thread rests until there is something to do."""

    def __init__(self, poller: Poller):
        self._fd = poller.fileno()
        self._lock = threading.Lock()
        self._outer = select.epoll()
        self._outer.register(self._fd, READ)
        forks.on_fork(self)

    def rest(self, timeout_s: float) -> None:
        """Wait, in the loop's thread, until there is something to do and no other thread polls."""
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
        """Free the descriptor; the holder of the lock does so, before the poller is closed."""
        self._outer.close()

    def forked(self) -> None:
        """See bml.io.forks."""
        self._outer.close()

    def _watch(self, events: int) -> None:
        if not self._outer.closed:
            self._outer.modify(self._fd, events)
