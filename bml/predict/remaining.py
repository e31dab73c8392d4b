"""How much longer a run takes, with an interval: from how far it was at which times. Times are arguments.

The rest is taken to go as the present view has gone since something changed last. A view that is new goes as
its steps are predicted to. What each view change cost before is expected again, as often as before. The
interval has two parts: chance in what is left, and that the rate is known from few steps only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

LEAST = 4
"""Measurements from which on anything is said."""
_MOST = 64
"""Measurements of a view that are kept; two neighbours become one when there are more."""
_CHANGED = 0.08
"""Relative change of the rate within a view from which on the older steps do not count, …"""
_CERTAIN = 4.0
"""… if it is so many times as large as chance makes it."""
_ENDLESS_S = 100 * 365 * 86400.0
"""A run that would take so long is one that somebody will end: nothing is said of it."""
_Z = 1.645
"""Of a normal distribution, 90 % are within so many deviations."""
_DRIFT = 0.045
"""A rate is never known better than this, relatively: on shared machines it wanders for minutes."""


@dataclass(frozen=True)
class Rest:
    """Seconds that are left: the estimate, and the interval in which it is nine times in ten."""

    seconds: float
    low_s: float
    high_s: float


@dataclass
class _View:
    """`blocks`: (share of the run, seconds) of stretches of the run, in order."""

    epoch: int
    blocks: list[tuple[float, float]] = field(default_factory=list)
    grain: float = 0.0

    def add(self, done: float, seconds: float) -> None:
        """Add a stretch; it is joined to the last one as long as that is shorter than the others."""
        if self.blocks and self.blocks[-1][0] < 0.75 * self.grain:
            last = self.blocks.pop()
            done, seconds = done + last[0], seconds + last[1]
        self.blocks.append((done, seconds))
        if len(self.blocks) > _MOST:
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=False)
            odd = self.blocks[len(self.blocks) // 2 * 2 :]
            self.blocks = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs] + odd
            self.grain = median(block[0] for block in self.blocks)


class Remaining:
    """The estimate of one run. `note` is called at boundaries of its loop, `rest` at any time.

    One thread at a time calls either.
    """

    def __init__(self) -> None:
        self._view: _View | None = None
        self._per_run_s = 0.0
        self._last: tuple[float, float] | None = None
        self._began: tuple[float, float] | None = None
        self._losses: list[float] = []
        self._expected: dict[int, float] = {}

    @property
    def done(self) -> float:
        """The share of the run that is done, as it was said last."""
        return self._last[0] if self._last else 0.0

    def note(self, done: float, epoch: int, now: float) -> None:
        """The share `done` of the run, 0 to 1, is done at this time, in this view.

        A share that is smaller than before is another run: all begins anew.
        """
        if self._last is not None and done < self._last[0]:
            self.__init__()  # type: ignore[misc]
        before, self._last = self._last, (done, now)
        if before is None or self._view is None:
            self._view, self._began = self._view or _View(epoch), (done, now)
            return
        if done == before[0]:
            self._last = before
            return
        stretch = done - before[0], now - before[1]
        if epoch != self._view.epoch:
            self._change(epoch, *stretch)
        else:
            self._view.add(*stretch)

    def _change(self, epoch: int, done: float, seconds: float) -> None:
        """A stretch in which the view changed: it says what that costs, and nothing else."""
        assert self._view is not None
        found = _rate(self._view.blocks)
        if found is not None:
            self._per_run_s = found[0]
            self._losses.append(max(0.0, seconds - done * found[0]))
        else:
            self._per_run_s *= self._expected.get(self._view.epoch, 1.0)
        self._view = _View(epoch)
        self._expected = {view: times for view, times in self._expected.items() if view >= epoch}

    def expect(self, epoch: int, times: float) -> None:
        """In view `epoch` steps are predicted to take so many times as long as in the one before.

        That may be said before the first boundary of that view.
        """
        self._expected[epoch] = times

    def rest(self, now: float) -> Rest | None:
        """What is left at this time; None as long as too little is known, and of a loop without an end."""
        if self._view is None or self._last is None or self._began is None:
            return None
        found = _rate(self._view.blocks)
        if found is None:
            if not self._per_run_s:
                return None
            found = self._per_run_s * self._expected.get(self._view.epoch, 1.0), 0.15, 1.0
        per_run_s, error, chance = found
        done, at_s = self._last
        left = 1.0 - done
        rest_s = left * per_run_s
        block = median(each[0] for each in self._view.blocks) if self._view.blocks else left
        relative = sqrt(error**2 + (chance * sqrt(block / left) if left else 0.0) ** 2 + _DRIFT**2)
        changes_s = self._changes_s(left)
        since_s = min(now - at_s, rest_s)
        whole_s = max(0.0, rest_s + changes_s - since_s)
        wide_s = _Z * relative * rest_s + 2 * changes_s
        return Rest(whole_s, max(0.0, whole_s - _Z * relative * rest_s), whole_s + wide_s)

    def _changes_s(self, left: float) -> float:
        """What view changes will cost, if they come as often as before; one alone may be the only one."""
        assert self._began is not None
        assert self._last is not None
        done = self._last[0] - self._began[0]
        if len(self._losses) < 2 or not done:
            return 0.0
        return sum(self._losses) / done * left


def _rate(blocks: list[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Seconds for a whole run; the relative error of that; the relative deviation of one block.

    Only since the last change within the view. None: too little is known, or it has no end.
    """
    whole, took_s = sum(each[0] for each in blocks), sum(each[1] for each in blocks)
    if len(blocks) < LEAST or took_s > whole * _ENDLESS_S:
        return None
    done, seconds = np.array(blocks).T
    since = _changed_at(seconds / done)
    done, seconds = done[since:], seconds[since:]
    n, rate = len(done), float(seconds.sum() / done.sum())
    chance = float(np.std(seconds / done, ddof=1)) / rate
    return rate, chance / sqrt(n) * (1 + 2 / n), chance


def _changed_at(rates: NDArray[np.float64]) -> int:
    """From which block on the rate is what it is now: after the clearest change, else the first block.

    Looks for one in the part after that again, as there may be several.
    """
    n = len(rates)
    if n <= LEAST:
        return 0
    sizes = np.arange(1, n - LEAST + 1)
    sums, squares = np.cumsum(rates), np.cumsum(rates**2)
    old, new = sums[sizes - 1] / sizes, (sums[-1] - sums[sizes - 1]) / (n - sizes)
    within = squares[-1] - sizes * old**2 - (n - sizes) * new**2
    deviation = np.maximum(np.sqrt(np.maximum(within, 0.0) / (n - 2)), 0.005 * new)
    clear = np.abs(new - old) / (deviation * np.sqrt(1 / sizes + 1 / (n - sizes)))
    clear[np.abs(new - old) < _CHANGED * new] = 0.0
    best = int(np.argmax(clear))
    if clear[best] < _CERTAIN:
        return 0
    since = int(sizes[best])
    return since + _changed_at(rates[since:])
