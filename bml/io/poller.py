"""An epoll loop for one thread: callbacks for file descriptors, timers, and wake-ups from other threads.

A callback may add, modify or remove any descriptor, also its own. The callback of a descriptor that was
removed in a pass is not called any more in that pass, even if the descriptor's number is in use again.
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
"""Reported even if nothing is read from a connection: the peer closed it, or died."""
BROKEN = select.EPOLLERR | select.EPOLLHUP
"""Reported always, even if it was not asked for."""

_MAX_READY = 256


class _Watch:
    __slots__ = ("active", "callback", "fd")

    def __init__(self, fd: int, callback: Callable[[int], None]) -> None:
        self.fd = fd
        self.callback = callback
        self.active = True


class Timer:
    """A callback that runs once, later; `cancel()` may be called at any time."""

    __slots__ = ("_callback", "_order")

    def __init__(self, due_s: float, number: int, callback: Callable[[], None]) -> None:
        self._order = (due_s, number)
        self._callback: Callable[[], None] | None = callback

    def __lt__(self, other: Timer) -> bool:
        return self._order < other._order

    @property
    def due_s(self) -> float:
        """The time on the monotonic clock, in seconds, when it is due."""
        return self._order[0]

    @property
    def cancelled(self) -> bool:
        """Whether the timer was cancelled or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Do not run it; no effect if it has run already."""
        self._callback = None

    def run(self) -> None:
        """Run the callback now, unless the timer was cancelled; the poller calls this."""
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
        self._wake_lock = threading.RLock()  # a signal handler may call `wake` while its thread is in `wake`
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        forks.on_fork(self)
        self.add(self._wake_fd, READ, self._woken)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._epoll.closed

    def fileno(self) -> int:
        """A descriptor that is readable when a watched descriptor is ready, so that `poll` would not wait."""
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
        """The time, on the clock of `now_s`, when `poll` must be called even if no descriptor is ready.

        It is infinity when there is no timer, and 0 when callbacks of `soon` wait.
        """
        timers = self._timers
        while timers and timers[0].cancelled:
            heapq.heappop(timers)
        return 0.0 if self.queued else timers[0].due_s if timers else math.inf

    def wake(self) -> None:
        """Make `poll` call `on_wake` and return; may be called from any thread, also after `close`."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float | None = None) -> int:
        """Wait until a descriptor is ready, or for `timeout_s` seconds (None: for ever); run the callbacks.

        Returns how many descriptors were ready. Timers and callbacks of `soon` end the wait, too.
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
        # The watches of this pass are looked up before any callback runs: if a descriptor is closed and its
        # number is used again during the pass, that is another watch, and the old one is not active any more.
        calls = [(watches[fd], events) for fd, events in ready if fd in watches]
        for watch, events in calls:
            if watch.active:
                watch.callback(events)
        if self._timers:
            self._run_timers()
        if self.queued:
            self._run_soon()

    def close(self) -> None:
        """Forget all callbacks and close the poller's own descriptors; watched ones stay open. Idempotent."""
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
        """Close the descriptors, which this process shares with its parent (see bml.io.forks)."""
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
        # Only timers due before now: a timer that sets itself again must not keep the pass from ending.
        now_s = time.monotonic()
        while self._timers and self._timers[0].due_s < now_s:
            heapq.heappop(self._timers).run()

    def _run_soon(self) -> None:
        # Only the present callbacks, one by one, so that an exception leaves the others in the queue.
        for _ in range(len(self.queued)):
            if self.queued:
                self.queued.popleft()()

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake_fd)
        if self._on_wake is not None:
            self._on_wake()
