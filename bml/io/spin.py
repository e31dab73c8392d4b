"""Spin-yield: a thread that waits yields its core a number of times before it sleeps.

What a server waits for usually happens sooner than a sleeping thread can be woken. So a thread that waits
calls `sched_yield` and looks again. But the kernel may have placed two servers on one core. Both are always
ready to run, so they stay there until the kernel balances its load, 10 ms later or more, which is the time of
a hundred small steps. Sleeping and waking does not separate them. This module notices such contention: a
yield that takes long has given the core to another thread. A thread that gets clearly less than its fair
share of its core moves to another core.
"""

from __future__ import annotations

import ctypes
import os
from time import perf_counter
from typing import NamedTuple

_LONG_YIELD_S = 12e-6
"""If a yield takes longer, another thread has worked meanwhile. In less time it can only have
yielded, too."""
_SHARED_GAP_S = 0.5e-3
"""After so long without such a yield the core is not shared any more; longer than a move takes."""
_LEAST_YIELDS = 4
"""The least number of long yields; a single one may be long because another process ran for a moment."""
_SHORTEST_S, _LONGEST_S = 0.25e-3, 16e-3
"""The time to watch before moving: at first, and at most, when moves have not helped."""
_FAIR_FRACTION = 0.75
"""A thread moves if it gets less than this fraction of its fair share of the core."""

_sched_getcpu = ctypes.CDLL(None).sched_getcpu


class Spin(NamedTuple):
    """How a thread waits before it sleeps: it yields its core and looks again, so many times.

    With `only_idle` it sleeps as soon as another thread wanted the core.
    """

    yields: int
    only_idle: bool


NO_SPIN = Spin(0, False)


class CoreContention:
    """Decides when a thread that yields is to move: by the share of its core's time that others have had.

    The thread has number `rank` of `n_threads`, which have about the same amount of work, on `n_cores`. It
    never moves if there are more than `most_per_core` threads to a core. A thread of a higher rank watches
    longer before it moves, so that not all threads leave a shared core at once.
    """

    def __init__(self, rank: int, n_threads: int, n_cores: int, most_per_core: int):
        self.may_move = n_cores > 1 and n_threads <= most_per_core * n_cores
        """Whether the thread ever moves; if not, its yields need not be timed."""
        self._most_yielded = 1 - _FAIR_FRACTION * min(1.0, n_cores / n_threads)
        self._shortest_s = self._window_s = _SHORTEST_S * (1 + rank)
        self._last_s = 0.0
        self._awake_until_s = 0.0
        self._begin(0.0)

    def yielded(self, from_s: float, to_s: float) -> bool:
        """Note that other threads had the core between these times; returns whether to move now."""
        if not self.shared_lately(from_s):
            self._begin(from_s)
            self._window_s = self._shortest_s
        self._last_s = to_s
        self._yielded_s += to_s - from_s
        self._n_yields += 1
        all_s = to_s - self._since_s
        if all_s < self._window_s or self._n_yields < _LEAST_YIELDS:
            return False
        contended = self._yielded_s > self._most_yielded * all_s
        self._window_s = min(2 * self._window_s, _LONGEST_S) if contended else self._shortest_s
        self._begin(to_s)
        return contended

    def wait_begins(self) -> None:
        """Note that a wait begins: it does not sleep on a shared core for as long as a move may take."""
        if self.may_move:
            self._awake_until_s = perf_counter() + _LONGEST_S

    def stays_awake(self, now_s: float) -> bool:
        """Whether it shared its core just now, and the other thread may be about to move."""
        return self.shared_lately(now_s) and now_s < self._awake_until_s

    def shared_lately(self, now_s: float) -> bool:
        """Whether it shared its core just now."""
        return now_s - self._last_s <= _SHARED_GAP_S

    def _begin(self, now_s: float) -> None:
        self._since_s, self._yielded_s, self._n_yields = now_s, 0.0, 0


def yield_core(contention: CoreContention) -> bool:
    """Let other ready threads run; then move to another core if it is time for that.

    Returns True if this yield counts towards the spin limit, after which the caller sleeps. It does not count
    while the core is shared with a thread that may move: the kernel may place a thread on the core of the
    thread that wakes it, and then the move would be in vain.
    """
    if not contention.may_move:
        os.sched_yield()
        return True
    from_s = perf_counter()
    os.sched_yield()
    to_s = perf_counter()
    if to_s - from_s > _LONG_YIELD_S and contention.yielded(from_s, to_s):
        _move()
    return not contention.stays_awake(to_s)


def yield_idle_core() -> bool:
    """Let other ready threads run; returns True if none was ready.

    Else the core, or the interpreter, is wanted by a thread that has more to do, and the caller should sleep:
    it is woken at once, and after a yield it waits for its turn.
    """
    from_s = perf_counter()
    os.sched_yield()
    return perf_counter() - from_s <= _LONG_YIELD_S


def n_cores() -> int:
    """The number of cores that the calling thread may use."""
    return len(os.sched_getaffinity(0))


def _move() -> None:
    """Move to another core that this thread may use; where it runs later is the kernel's choice.

    The affinity mask is restored. It is now the thread's own: it does not grow if the cpuset grows later.
    """
    allowed = os.sched_getaffinity(0)
    others = allowed - {_sched_getcpu()}
    if others:
        os.sched_setaffinity(0, others)
        os.sched_setaffinity(0, allowed)
