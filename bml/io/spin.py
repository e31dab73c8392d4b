"""Giving way to others while waiting, and noticing that a core is shared while another may be free.

What a server waits for is usually there sooner than one can be woken, so it yields, and looks again. But the
kernel may have woken two servers on one core. As both are always ready to run they stay there until it
balances its load, 10 ms later or more, which is a hundred small steps; to sleep and be woken does not part
them. A yield that takes long has given the core to somebody else: whoever gets clearly less than a fair share
goes to another core.
"""

from __future__ import annotations

import ctypes
import os
from time import perf_counter

_LONG_YIELD_S = 12e-6
"""A yield that takes longer has let another thread work; in less it has waited, too, and given way itself."""
_SHARED_GAP_S = 0.5e-3
"""So long without such a yield, and the core is not shared any more; longer than it takes to move."""
_LEAST_YIELDS = 4
"""One yield may be long because something else has run for a moment."""
_SHORTEST_S, _LONGEST_S = 0.25e-3, 16e-3
"""How long to look before moving: at first, and at most, if that has not helped."""
_FAIR_FRACTION = 0.75
"""A smaller part of a fair share than this is no chance."""

_sched_getcpu = ctypes.CDLL(None).sched_getcpu


class CoreContention:
    """Decides when a thread that gives way is to move: by how much of its core's time others have had.

    It is the one of number `rank` of `n_threads` that have about the same to do, on `n_cores`. If there are
    more than `most_per_core` to a core it never moves. Not all that share a core are to leave it at once, so
    a higher rank takes longer to decide.
    """

    def __init__(self, rank: int, n_threads: int, n_cores: int, most_per_core: int):
        self.may_move = n_cores > 1 and n_threads <= most_per_core * n_cores
        """Whether it ever does; if not, nothing is to be noted."""
        self._most_yielded = 1 - _FAIR_FRACTION * min(1.0, n_cores / n_threads)
        self._shortest_s = self._window_s = _SHORTEST_S * (1 + rank)
        self._last_s = 0.0
        self._awake_until_s = 0.0
        self._begin(0.0)

    def yielded(self, from_s: float, to_s: float) -> bool:
        """Others had its core from then until then; returns whether it is to move now."""
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
        """A wait begins: for as long as moving may take, it is not to sleep beside somebody who may move."""
        if self.may_move:
            self._awake_until_s = perf_counter() + _LONGEST_S

    def stays_awake(self, now_s: float) -> bool:
        """Whether it has shared its core just now, perhaps with somebody who is about to move."""
        return self.shared_lately(now_s) and now_s < self._awake_until_s

    def shared_lately(self, now_s: float) -> bool:
        """Whether it has shared its core just now."""
        return now_s - self._last_s <= _SHARED_GAP_S

    def _begin(self, now_s: float) -> None:
        self._since_s, self._yielded_s, self._n_yields = now_s, 0.0, 0


def yield_core(contention: CoreContention) -> bool:
    """Let others run that are ready to; then go to another core if it is time for that.

    Returns whether this counts for who gives way so often before it sleeps. Beside somebody who moves it does
    not: the kernel may put a thread that it wakes on the core of whoever wakes it, and all was in vain.
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


def n_cores() -> int:
    """How many cores the calling thread may use."""
    return len(os.sched_getaffinity(0))


def _move() -> None:
    """Go to another core of those that this thread may use; where it runs later is the kernel's choice.

    The mask that is restored becomes the thread's own: if its cpuset grows later, it does not grow with it.
    """
    allowed = os.sched_getaffinity(0)
    others = allowed - {_sched_getcpu()}
    if others:
        os.sched_setaffinity(0, others)
        os.sched_setaffinity(0, allowed)
