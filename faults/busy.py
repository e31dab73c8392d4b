"""Slows the computation of a training function down, as a busy or throttled machine does: the fault `busy`.

What runs between two calls of the session is computation, and so is `recompute`. The next call begins with
a pause that is as long as the machine would have computed for others: the training thread sleeps, and no
other thread of the server is held up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass
class _Spell:
    """The time during which one fault takes `share` (0 <= share < 1) of the computation."""

    share: float
    from_s: float
    until_s: float = inf

    def pause_s(self, since_s: float, now_s: float) -> float:
        """How long to pause for what was computed between these times."""
        computed_s = min(now_s, self.until_s) - max(since_s, self.from_s)
        return max(0.0, computed_s) * self.share / (1 - self.share)


class Slowdown:
    """Begun and ended by faults, in any thread; `pause` and `resume` are called by the session.

    Of several at a time the pauses add up. `clock` gives seconds, `sleep` takes them.
    """

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]):
        self._clock = clock
        self._sleep = sleep
        self._spells: list[_Spell] = []
        self.active = False
        """Whether `pause` and `resume` have anything to do."""
        self._since_s = -inf

    def begin(self, share: float) -> Callable[[], None]:
        """Take that share of the computation away from now on; returns what ends it."""
        spell = _Spell(share, self._clock())
        self._spells.append(spell)
        self.active = True

        def end() -> None:
            spell.until_s = self._clock()

        return end

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
