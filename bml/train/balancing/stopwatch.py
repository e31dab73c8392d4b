"""How long this server computes per sample: from the hand-out of a batch to its first contribution."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from types import TracebackType

PICOSECONDS = 10**12
_MOST_PS = 10**15
"""The longest time per sample that is told, in picoseconds: sums of integers cannot overflow with it."""


class Stopwatch:
    """Times the batches of one session; `clock` gives seconds. `with stopwatch:` is a wait for the others.

    The training thread calls everything but `stop`, which the thread of the steps may call for it.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._began_s: float | None = None
        self._paused_at_s = self._waited_s = 0.0
        self._n_samples = 0
        self.all_waited_s = 0.0
        """All waits so far, in seconds."""
        self.times: list[float] = []
        """The seconds per sample of each batch; the list of the loop that goes on."""

    @property
    def runs(self) -> bool:
        """Whether a share was handed out of which no gradient is there yet."""
        return self._began_s is not None

    def start(self, n_samples: int) -> None:
        """A share of so many samples is handed out; with 0 it is not timed."""
        self._began_s = self._clock() if n_samples else None
        self._n_samples, self._waited_s = n_samples, 0.0

    def stop(self) -> None:
        """The share's gradient is there, or the first part of it. Later parts change nothing."""
        began_s, self._began_s = self._began_s, None
        if began_s is not None:
            computed_s = self._clock() - began_s - self._waited_s
            if computed_s > 0:
                self.times.append(computed_s / self._n_samples)

    def __enter__(self) -> None:
        self._paused_at_s = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        waited_s = self._clock() - self._paused_at_s
        self._waited_s += waited_s
        self.all_waited_s += waited_s

    def take(self) -> int:
        """Return the median of `times` in whole picoseconds, and empty it; 0 if it is empty."""
        if not self.times:
            return 0
        picoseconds = round(median(self.times) * PICOSECONDS)
        self.times.clear()
        return min(max(1, picoseconds), _MOST_PS)
