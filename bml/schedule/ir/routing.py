"""Chooses the way of a tree edge: the direct hop, the wiring's own route, or the least busy live detour.

A detour is chosen among shortest live paths so that the busiest NIC on it is least busy: all choices of
one forest share one account of loads, so that relays are loaded evenly.
"""

from __future__ import annotations

from collections import defaultdict
from math import lcm

import numpy as np
from numpy.typing import NDArray

from bml.faults.detour import Path, shortest_paths
from bml.topology import Fabric

_Column = NDArray[np.integer]


class Balance:
    """Times of all NICs so far, and the choice of the path that raises the busiest one least.

    One total per NIC, sent plus received, stands for either direction of both phases: where the broadcast
    is the reduce phase reversed, a NIC receives in one phase what it sends in the other. Times are integers:
    a piece's weight over the rate of the link, in a unit that makes all of them whole.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._scale = lcm(*(rate.numerator for _, rate in fabric.rates))
        self._choices: dict[tuple[int, int], tuple[Path, ...]] = {}
        self._sent: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._received: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._total: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._uncounted: list[tuple[_Column, _Column, _Column, _Column, _Column | None]] = []
        """Direct hops, counted when the first detour is to be chosen: on a healthy fabric never."""

    def add_direct(
        self,
        sender: _Column,
        level: _Column,
        receiver: _Column,
        stage: _Column,
        weight: _Column | None = None,
    ) -> None:
        """Count many hops; all columns have one length, no weight means 1 each."""
        self._uncounted.append((sender, level, receiver, stage, weight))

    def _count(
        self, sender: _Column, level: _Column, receiver: _Column, stage: _Column, weight: _Column | None
    ) -> None:
        shape = (int(stage.max(initial=0)) + 1, self._fabric.n_servers, self._fabric.levels)
        amounts = np.ones(len(sender), np.int64) if weight is None else weight
        for loads, end in ((self._sent, sender), (self._received, receiver)):
            counts = np.zeros(shape, np.int64)
            np.add.at(counts, (stage, end, level), amounts)
            for number, server, nic in np.argwhere(counts).tolist():
                time = int(counts[number, server, nic]) * self._pace(server, nic)
                loads[number, server, nic] += time
                self._total[server, nic] += time

    def add(self, path: Path, stage: int, weight: int = 1) -> None:
        """Count every hop of a path."""
        for sender, level, receiver in path:
            out, into = weight * self._pace(sender, level), weight * self._pace(receiver, level)
            self._sent[stage, sender, level] += out
            self._received[stage, receiver, level] += into
            self._total[sender, level] += out
            self._total[receiver, level] += into

    def choose(self, source: int, target: int, stage: int, weight: int = 1) -> Path:
        """Pick and count a path; see `pick`."""
        best = self.pick(source, target, stage)
        self.add(best, stage, weight)
        return best

    def pick(self, source: int, target: int, stage: int) -> Path:
        """Pick the shortest path whose busiest NIC is least busy, overall first, then in its stage.

        Raises:
            FabricError: no live path joins the two.
        """
        while self._uncounted:
            self._count(*self._uncounted.pop())
        pair = (source, target)
        if pair not in self._choices:
            self._choices[pair] = shortest_paths(self._fabric, source, target)
        return min(self._choices[pair], key=lambda path: self._price(path, stage))

    def _pace(self, server: int, level: int) -> int:
        """Time that one unit of weight takes on a link."""
        if not self._fabric.rates:
            return 1
        rate = self._fabric.rate(server, level)
        return self._scale * rate.denominator // rate.numerator

    def _price(self, path: Path, stage: int) -> tuple[int, int, int]:
        totals = [self._total[end, level] for sender, level, to in path for end in (sender, to)]
        staged = max(
            max(self._sent[stage, sender, level], self._received[stage, receiver, level])
            for sender, level, receiver in path
        )
        return max(totals), staged, sum(totals)


class Router:
    """Paths of tree edges on what is left of a fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._routes: dict[tuple[int, int, int], Path] = {}
        self._live: set[tuple[int, int, int]] = {
            (server, level, other)
            for server, level in fabric.links
            for other in fabric.neighbours(server, level)
        }

    def nominal(self, source: int, target: int, turn: int) -> Path:
        """Return the wiring's own route, or nothing if a part of it is dead."""
        key = (source, target, turn)
        if key not in self._routes:
            path = self._fabric.route(source, target, turn)
            self._routes[key] = path if all(hop in self._live for hop in path) else ()
        return self._routes[key]


def joined(fabric: Fabric, sender: _Column, level: _Column, receiver: _Column) -> NDArray[np.bool_]:
    """Whether a live switch of that level joins the two; level -1 joins none."""
    known = level >= 0
    nic = np.where(known, level, 0)
    alive = fabric.nics[sender, nic] & fabric.nics[receiver, nic]
    together: NDArray[np.bool_] = fabric.groups[sender, nic] == fabric.groups[receiver, nic]
    return known & alive & together
