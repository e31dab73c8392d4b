"""The ports of the simulated NICs: each carries so many bytes per second, one frame after the other.

As TCP does, a connection has little under way at a time: a frame takes its turn at the ports when one before
it is over, so that connections share a port.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeAlias

from bml.sim.world.network import Network

Port: TypeAlias = tuple[int, int, bool]
"""(server, level, whether it is the one that sends)."""

WANDER = 0.2
"""By so much more or less than its rate a port carries."""

WINDOW = 2
"""So many frames of a connection may be under way."""

_SEGMENT_NBYTES = 128
"""So much is acknowledged at a time: about a hundredth of what TCP hands over, as rates are of real ones."""

_WANDERS_S = 0.5
"""After this time a port carries another amount."""


class _Crossing(NamedTuple):
    """A frame at a port, from the moment at which it comes there."""

    begins_s: float
    ends_s: float
    nbytes: int

    def segments(self, now: float) -> int:
        """How many of its segments are through."""
        n_segments = -(-self.nbytes // _SEGMENT_NBYTES)
        if now >= self.ends_s:
            return n_segments
        return int(n_segments * (now - self.begins_s) / (self.ends_s - self.begins_s))


class Ports:
    """All ports; a healthy one carries `rate_nbytes_s` (0: without a limit) and wanders, as `seed` says."""

    def __init__(self, network: Network, rate_nbytes_s: float, seed: int):
        self.network = network
        self._rate_nbytes_s = rate_nbytes_s
        self._seed = seed
        self._under_way: Counter[Hashable] = Counter()
        self._crossing: defaultdict[Hashable, deque[_Crossing]] = defaultdict(deque)
        self._crossed: Counter[Hashable] = Counter()
        self._waiting: defaultdict[Hashable, deque[Callable[[], None]]] = defaultdict(deque)
        self._free_at: defaultdict[Port, float] = defaultdict(float)
        self._shares: defaultdict[Port, list[float]] = defaultdict(list)
        self._wanders: dict[Port, tuple[float, float]] = {}
        self._delays_s: defaultdict[Port, list[float]] = defaultdict(list)
        self._left_at: defaultdict[Port, float] = defaultdict(float)

    @property
    def limited(self) -> bool:
        """Whether there is a rate that can be measured."""
        return self._rate_nbytes_s > 0

    def slow_down(self, ports: Iterable[Port], share: float) -> Callable[[], None]:
        """These ports carry that share of their rate from now on; the slowest of several counts.

        Returns what ends it.
        """
        return _put(self._shares, ports, share)

    def hold_up(self, ports: Iterable[Port], delay_s: float) -> Callable[[], None]:
        """Hold up what these ports carry for random times of up to `delay_s`; returns what ends it."""
        return _put(self._delays_s, ports, delay_s)

    def carry(
        self, channel: Hashable, way: tuple[int, int, int], nbytes: int, done: Callable[[], None]
    ) -> None:
        """Carry a frame of a connection's `channel` the way (origin, to, level); then call `done`."""
        if not self._rate_nbytes_s:
            done()
            return

        origin, to, level = way

        def begin() -> None:
            self._under_way[channel] += 1
            self.network.after(self._takes_s(channel, (origin, level, True), nbytes), arrive)

        def arrive() -> None:
            self.network.after(self._takes_s(channel, (to, level, False), nbytes), end)

        def end() -> None:
            self._under_way[channel] -= 1
            done()
            if self._waiting[channel]:
                self._waiting[channel].popleft()()

        if self._under_way[channel] < WINDOW:
            begin()
        else:
            self._waiting[channel].append(begin)

    def crossed(self, channel: Hashable) -> int:
        """How many segments of a connection's frames have gone through a port; those of both ports count.

        Connections share a port segment by segment, so a frame goes through it from the moment at which it
        comes there, though it ends behind those that came before.
        """
        crossing, now = self._crossing[channel], self.network.now
        while crossing and crossing[0].ends_s <= now:
            self._crossed[channel] += crossing.popleft().segments(now)
        return self._crossed[channel] + sum(each.segments(now) for each in crossing)

    def _takes_s(self, channel: Hashable, port: Port, nbytes: int) -> float:
        """How long a frame takes at this port from now, behind those that came to it before."""
        now = self.network.now
        self._free_at[port] = max(now, self._free_at[port]) + nbytes / self._rate(port, now)
        late_s = self.network.random.uniform(0, max(self._delays_s[port])) if self._delays_s[port] else 0.0
        # Frames stay in order, also behind one that was late.
        self._left_at[port] = max(self._left_at[port], self._free_at[port] + late_s)
        self._crossing[channel].append(_Crossing(now, self._left_at[port], nbytes))
        return self._left_at[port] - now

    def _rate(self, port: Port, now: float) -> float:
        share = min(self._shares[port], default=1.0)
        return self._rate_nbytes_s * share * self._wander(port, now // _WANDERS_S)

    def _wander(self, port: Port, window: float) -> float:
        """By what a healthy port's rate is multiplied in this window of time; it is drawn once."""
        drawn, wander = self._wanders.get(port, (-1.0, 1.0))
        if drawn != window:
            wander = random.Random(f"{self._seed} {port} {window}").uniform(1 - WANDER, 1 + WANDER)
            self._wanders[port] = window, wander
        return wander


def _put(values: defaultdict[Port, list[float]], ports: Iterable[Port], value: float) -> Callable[[], None]:
    """Put a value to these ports; returns what takes it away."""
    of = [values[port] for port in ports]
    for each in of:
        each.append(value)

    def take() -> None:
        for each in of:
            each.remove(value)

    return take
