"""Slows the computation of a training function down, as a busy or throttled machine does: the fault `busy`.

What runs between two calls of the session is computation, and so is `recompute`. The next call begins with
a pause that is as long as the machine would have computed for others: the training thread sleeps, and no
other thread of the server is held up.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple


class _Spell(NamedTuple):
    """The time during which one fault takes `share` (0 <= share < 1) of the computation."""

    share: float
    from_s: float
    until_s: float

    def pause_s(self, since_s: float, now_s: float) -> float:
        """How long to pause for what was computed between these times.

        A slow machine would have computed less of it before the end of the spell, and the rest at its full
        speed: it loses no more than its share of the time that was left.
        """
        begun_s = max(since_s, self.from_s)
        computed_s, left_s = max(0.0, now_s - begun_s), max(0.0, self.until_s - begun_s)
        return min(computed_s * self.share / (1 - self.share), left_s * self.share)


class Slowdown:
    """Faults begin it, in any thread; `pause` and `resume` are called by the session.

    Of several at a time the pauses add up. `clock` gives seconds, `sleep` takes them, and may return sooner.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], object]):
        self._clock = clock
        self._sleep = sleep
        self._spells: list[_Spell] = []
        self.active = False
        """Whether `pause` and `resume` have anything to do."""
        self._since_s = -inf

    def begin(self, share: float, duration_s: float = inf) -> None:
        """Take that share of the computation away from now on, for so many seconds."""
        from_s = self._clock()
        self._spells.append(_Spell(share, from_s, from_s + duration_s))
        self.active = True

    def pause(self) -> None:
        """A call begins: sleep for what was computed since the last one returned."""
        now_s = self._clock()
        pause_s = sum(spell.pause_s(self._since_s, now_s) for spell in tuple(self._spells))
        self._since_s = now_s  # first: a signal's handler may raise while it sleeps
        if pause_s:
            self._sleep(pause_s)
        self.resume()

    def resume(self) -> None:
        """A call returns, or computation begins in it."""
        self._since_s = since_s = self._clock()
        n_spells = len(self._spells)
        if all(spell.until_s <= since_s for spell in tuple(self._spells)):
            self.active = False
            if len(self._spells) > n_spells:  # one has just begun, in another thread
                self.active = True
