"""How long the way is between two servers, and to the coordinator: each on its own, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bml.topology import Fabric

MOST_S = 0.15
"""The longest way, in seconds in one direction."""
_LEAST_S = 0.002  # less changes the order of nothing
_SLOW = (0.2, 0.6)
"""How likely a way is slow, in runs that have slow ones."""


@dataclass(frozen=True)
class Delays:
    """The time that slow ways take beside the jitter that all ways have, in seconds.

    `links`: (lower server, higher server, level) -> that of the connection and its heartbeats. `control`:
    server -> that of its connection to the coordinators.
    """

    links: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    control: Mapping[int, float] = field(default_factory=dict)

    @property
    def longest_s(self) -> float:
        """The longest of all, in seconds."""
        return max([*self.links.values(), *self.control.values()], default=0.0)

    def link(self, a: int, b: int, level: int) -> float:
        """Of the connection of these two servers on this level."""
        return self.links.get((min(a, b), max(a, b), level), 0.0)

    def between(self, servers: Iterable[int], fabric: Fabric, way_s: float) -> Delays:
        """The same, and all links between these servers take so long."""
        among = sorted({*servers})
        more = {
            (a, b, level): way_s
            for a in among
            for level in range(fabric.levels)
            for b in fabric.neighbours(a, level)
            if b in among and a < b
        }
        return Delays({**self.links, **more}, self.control)

    def far(self, servers: Iterable[int], way_s: float) -> Delays:
        """The same, and the way from these servers to the coordinators takes so much longer."""
        longer = {server: self.control.get(server, 0.0) + way_s for server in servers}
        return Delays(self.links, {**self.control, **longer})

    def __bool__(self) -> bool:
        return bool(self.links or self.control)

    def __str__(self) -> str:
        slow = [(f"{a}-{b} on level {level}", late) for (a, b, level), late in self.links.items()]
        slow += [(f"the coordinator to {server}", late) for server, late in self.control.items()]
        return ", ".join(f"{way} {late * 1000:.0f} ms" for way, late in slow)


NONE = Delays()


def draw_delays(chance: random.Random, fabric: Fabric) -> Delays:
    """Slow links, slow control channels, both or none of them: data and control are independent."""
    links: dict[tuple[int, int, int], float] = {}
    control: dict[int, float] = {}
    slow = chance.choice(_SLOW)
    if chance.random() < 0.5:
        for level in range(fabric.levels):
            for a in fabric.servers:
                for b in fabric.neighbours(a, level):
                    if a < b and chance.random() < slow:
                        links[a, b, level] = _draw(chance)
    if chance.random() < 0.5:
        control = {server: _draw(chance) for server in fabric.servers if chance.random() < slow}
    return Delays(links, control)


def _draw(chance: random.Random) -> float:
    """As often a few milliseconds as many."""
    return float(_LEAST_S * (MOST_S / _LEAST_S) ** chance.random())
