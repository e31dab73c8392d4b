"""A virtual clock and a fake network: messages arrive in order per channel, after seeded delays."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable

Action = Callable[[], None]


class Network:
    """Runs actions at virtual times; `random` is the only source of chance."""

    def __init__(self, seed: int, delay_s: tuple[float, float] = (0.0001, 0.002)):
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self._delay_s = delay_s
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0
        self._last: dict[Hashable, float] = {}

    def at(self, when_s: float, action: Action) -> None:
        """Run `action` at this time, after everything that was asked for the same time before."""
        self._count += 1
        heapq.heappush(self._heap, (max(when_s, self.now), self._count, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Run `action` so many seconds from now."""
        self.at(self.now + delay_s, action)

    def deliver(self, channel: Hashable, action: Action, way_s: float = 0.0) -> None:
        """Run `action` after a random delay and `way_s`, never before earlier actions of `channel`."""
        arrives_s = self.now + way_s + self.random.uniform(*self._delay_s)
        when_s = max(arrives_s, self._last.get(channel, 0.0))
        self._last[channel] = when_s
        self.at(when_s, action)

    def run(self, until: Callable[[], bool], deadline_s: float, most_events: float = float("inf")) -> bool:
        """Run until the condition holds (True), or nothing is left or deadline or events are over (False)."""
        while not until():
            if not self._heap or self._heap[0][0] > deadline_s or self.events >= most_events:
                return False
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()
        return True
