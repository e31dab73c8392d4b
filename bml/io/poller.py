"""One epoll loop, run by one thread: file descriptors, timers, and a wake-up from other threads.

A callback may add, modify or remove any descriptor, its own too: a descriptor that was removed in a pass is
not called any more in that pass, even if its number was used again.
"""

from __future__ import annotations

import heapq
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from bml.io import forks

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
PEER_CLOSED = select.EPOLLRDHUP
"""Reported on its own when a connection is not being read and the peer closed or died."""
BROKEN = select.EPOLLERR | select.EPOLLHUP
"""Always reported, whether asked for or not."""

_MAX_READY = 256


class _Watch:
    __slots__ = ("active", "callback", "fd")

    def __init__(self, fd: int, callback: Callable[[int], None]) -> None:
        self.fd = fd
        self.callback = callback
        self.active = True


class Timer:
    """A callback that runs once, later; `cancel()` any time."""

    __slots__ = ("_callback", "_order")

    def __init__(self, due_s: float, number: int, callback: Callable[[], None]) -> None:
        self._order = (due_s, number)
        self._callback: Callable[[], None] | None = callback

    def __lt__(self, other: Timer) -> bool:
        return self._order < other._order

    @property
    def due_s(self) -> float:
        """When it is due on the monotonic clock, in seconds."""
        return self._order[0]

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Never run it; no effect if it ran already."""
        self._callback = None

    def run(self) -> None:
        """Run it now unless it was cancelled; the poller does this."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Poller:
    """Waits for descriptors, timers and wake-ups, and calls their callbacks.

    Everything but `wake` belongs to one thread. `on_wake` is called in `poll`, once for any number of
    `wake()` calls since. `guard`, such as a lock, is held while callbacks run and not while `poll` waits, so
    that another thread can use the same objects meanwhile. An exception of a callback leaves `poll` as it is;
    no event is lost by it, since descriptors are level-triggered.
    """

    def __init__(
        self,
        on_wake: Callable[[], None] | None = None,
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        self._on_wake = on_wake
        self.guard = nullcontext() if guard is None else guard
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}
        self._timers: list[Timer] = []
        self._timer_count = 0
        self.queued: deque[Callable[[], None]] = deque()
        """Callbacks of `soon` that wait to be called."""
        self._wake_lock = threading.RLock()  # the handler of a signal may wake while its thread does
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        forks.on_fork(self)
        self.add(self._wake_fd, READ, self._woken)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._epoll.closed

    def fileno(self) -> int:
        """A descriptor that can be read when `poll` would not wait for one of those that are watched."""
        return self._epoll.fileno()

    def add(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` in every pass in which `fd` has one of `events` (or is broken)."""
        self._epoll.register(fd, events)
        self._watches[fd] = _Watch(fd, callback)

    def modify(self, fd: int, events: int) -> None:
        """Watch `fd` for other events from now on; the callback stays."""
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Stop watching `fd`; call it before the descriptor is closed. No effect if not watched."""
        watch = self._watches.pop(fd, None)
        if watch is not None:
            watch.active = False
            if not self._epoll.closed:
                self._epoll.unregister(fd)

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback()` once, `delay_s` seconds from now."""
        self._timer_count += 1
        timer = Timer(time.monotonic() + delay_s, self._timer_count, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def now_s(self) -> float:
        """The clock of timers, in seconds."""
        return time.monotonic()

    def soon(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once, in `poll`, before it next waits."""
        self.queued.append(callback)

    @property
    def due_s(self) -> float:
        """When `poll` is needed whatever is ready, on the clock of `now_s`; infinity if that is not known."""
        timers = self._timers
        while timers and timers[0].cancelled:
            heapq.heappop(timers)
        return 0.0 if self.queued else timers[0].due_s if timers else math.inf

    def wake(self) -> None:
        """Make `poll` return and call `on_wake`; from any thread, also after `close`."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float | None = None) -> int:
        """Wait until something is ready or `timeout_s` is over (None: for ever) and run its callbacks.

        Returns how many descriptors were called. Timers and `soon` callbacks end the wait too.
        """
        if self.queued:
            with self.guard:
                self._run_soon()
        ready = self._epoll.poll(self._wait_s(timeout_s), _MAX_READY)
        with self.guard:
            self._call(ready)
        return len(ready)

    def _call(self, ready: list[tuple[int, int]]) -> None:
        watches = self._watches
        # The watches of this pass are looked up before any callback runs: a number that is closed
        # and used again during the pass is another watch, and the stale one is not active any more.
        calls = [(watches[fd], events) for fd, events in ready if fd in watches]
        for watch, events in calls:
            if watch.active:
                watch.callback(events)
        if self._timers:
            self._run_timers()
        if self.queued:
            self._run_soon()

    def close(self) -> None:
        """Forget everything and free the poller's own descriptors; watched ones stay open. Idempotent."""
        with self._wake_lock:
            if self._wake_fd < 0:
                return
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)
        for watch in self._watches.values():
            watch.active = False
        self._watches.clear()
        self._timers.clear()
        self.queued.clear()
        self._epoll.close()

    def forked(self) -> None:
        """Let go of the descriptors, which this process shares with its parent (see bml.io.forks)."""
        fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)
        self._epoll.close()

    def _wait_s(self, timeout_s: float | None) -> float | None:
        due_s = self.due_s
        if due_s == math.inf:
            return timeout_s
        until_s = max(0.0, due_s - time.monotonic()) if due_s else 0.0
        return until_s if timeout_s is None or timeout_s < 0 else min(until_s, timeout_s)

    def _run_timers(self) -> None:
        # Strictly before now: a timer that sets itself again must not keep the pass from ending.
        now_s = time.monotonic()
        while self._timers and self._timers[0].due_s < now_s:
            heapq.heappop(self._timers).run()

    def _run_soon(self) -> None:
        # Only those that are there now; one by one, so that an exception leaves the others in place.
        for _ in range(len(self.queued)):
            if self.queued:
                self.queued.popleft()()

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake_fd)
        if self._on_wake is not None:
            self._on_wake()
