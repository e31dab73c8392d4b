"""The time that servers compute in random programs: virtual seconds, which pass with the samples."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import cycle

PACE_OF = 12
"""After so many gradients a server computes at its next pace."""
_NOISE = 0.1


class Clock(threading.local):
    """The clock of the server whose training function runs in the thread that asks."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.begin(0, (1.0,))

    def begin(self, seed: int, paces: Sequence[float], batch_s: float = 0.0) -> None:
        """A server begins in this thread: it takes these seconds per sample, one pace after the other.

        A gradient takes `batch_s` seconds besides, whatever the number of its samples.
        """
        self._batch_s = batch_s
        self._paces = cycle(paces)
        self._pace, self._left = next(self._paces), PACE_OF
        self._chance = random.Random(seed)

    def compute(self, n_samples: int) -> None:
        """Let the time pass in which so many samples are computed."""
        self.now_s += self._batch_s + n_samples * self._pace * (1 + _NOISE * self._chance.random())
        self._left -= 1
        if not self._left:
            self._pace, self._left = next(self._paces), PACE_OF


CLOCK = Clock()
