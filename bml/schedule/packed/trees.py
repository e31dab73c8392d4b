"""Many spanning trees that share the NICs of a fabric, changed one subtree at a time so that all NICs fit.

A tree edge is used once in each phase, so it loads each of its two NICs by one piece in either
direction: the load of a NIC is the sum of its degrees, whatever the root. Packing means that no NIC has
more than its room. The price of a NIC doubles with every piece that it carries; a subtree is moved when
its edges become cheaper by it (Blink's multiplicative weights, as a local search). All decisions are
taken on integers and powers of two, in a fixed order: every server that plans alone gets the same trees.

Source of the idea: Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from bml.schedule.ir.nics import Nics

_STEEPEST = 1000
"""Prices are 2^(load - room); beyond 2^±1000 they no longer change, to stay within the range of a float."""
_PRICES = [2.0**step for step in range(-_STEEPEST, _STEEPEST + 1)]
_LEVEL_GROUND = 1e-9
"""Relative difference of two sums of prices below which they count as equal (sums of floats round)."""

Table = list[list[int]]
"""[tree][place]."""
Hub = tuple[int, float]
"""The best parent in a group, -1 if there is none, and its price when it was chosen."""
Offer = tuple[int, float, int, int, int]
"""(rank, price, depth of the parent, NIC of the newcomer, NIC of the parent)."""


@dataclass(frozen=True, eq=False)
class Standing:
    """All trees of a packing of which only some may change; the others see only what they load.

    Attributes:
        changes: int64 [change], number of each tree that may change.
        roots: int64 [tree], place of the root.
        own, parent, depth: int32 [tree, place], as in `Trees`; of trees that change, what they were at first.
    """

    changes: NDArray[np.int64]
    roots: NDArray[np.int64]
    own: NDArray[np.int32]
    parent: NDArray[np.int32]
    depth: NDArray[np.int32]


def _loads(n_nics: int, *tables: Table | NDArray[np.int32]) -> list[int]:
    """NIC -> how often it is in these tables."""
    rows = (row for table in tables for row in table)
    found = np.zeros(n_nics + 1, np.int64)
    for row in rows:
        found += np.bincount(np.asarray(row, np.int64) + 1, minlength=n_nics + 1)  # -1: no edge
    loads: list[int] = found[1:].tolist()
    return loads


class Trees:
    """Rooted trees over the live servers of `nics`, and what they load.

    Attributes:
        nics: the NICs.
        standing: all trees, if some do not change; the tables below have only those that do, in their order.
        roots: tree -> place of its root.
        room: NIC -> pieces that it should carry at most.
        max_depth: depth that changed subtrees keep to.
        load: NIC -> pieces that it carries.
        own: [tree][place] NIC on which a server sends to its parent; -1 for the root and the missing.
        parent: [tree][place] NIC of the parent at the other end; -1 likewise.
        depth: [tree][place] hops to the root; -1 for the missing.
        effort: servers brought in so far, each time that one was, also in vain: what time goes into.
    """

    def __init__(self, nics: Nics, roots: list[int], room: list[int], max_depth: int) -> None:
        self.nics = nics
        self.standing: Standing | None = None
        self.roots = roots
        self.max_depth = max_depth
        self.load = [0] * len(nics.owner)
        self.own: Table = []
        self.parent: Table = []
        self.depth: Table = []
        self.effort = 0
        self._missing: Table = []
        # Pieces that missing servers are about to bring to their NICs: others should leave them room.
        self._expected = [0.0] * len(nics.owner)
        self.set_room(room)

    @classmethod
    def among(cls, nics: Nics, standing: Standing, max_depth: int) -> Trees:
        """The trees of `standing` that may change, without room; servers of depth -1 are missing in them."""
        changes = standing.changes
        made = cls(nics, standing.roots[changes].tolist(), [0] * len(nics.owner), max_depth)
        made.standing = standing
        made.own, made.parent, made.depth = (
            table[changes].tolist() for table in (standing.own, standing.parent, standing.depth)
        )
        made.load = _loads(len(nics.owner), standing.own, standing.parent)
        is_absent = standing.depth[changes] < 0
        made._missing = [np.flatnonzero(row).tolist() for row in is_absent]
        absent = is_absent.sum(axis=0).tolist()
        for place, own in enumerate(nics.of):
            for nic in own:
                made._expected[nic] = absent[place] / len(own)
        return made

    @property
    def n_missing(self) -> int:
        """Servers that are missing in the trees of `standing`, each as often as it is."""
        return sum(map(len, self._missing))

    @property
    def pieces(self) -> int:
        """Number of trees, those that do not change included."""
        return len(self.standing.roots) if self.standing else len(self.roots)

    def set_room(self, room: list[int]) -> None:
        """Change what the NICs should carry at most."""
        self.room = room
        self._price = [self._price_at(nic, load) for nic, load in enumerate(self.load)]

    def copy(self) -> Trees:
        """Return the same trees, to be changed on their own."""
        twin = Trees(self.nics, self.roots, self.room, self.max_depth)
        twin.own, twin.parent, twin.depth = (
            [list(row) for row in table] for table in (self.own, self.parent, self.depth)
        )
        twin.load, twin._price = list(self.load), list(self._price)
        return twin

    def add_edges(self, own: Table, parent: Table, depth: Table) -> None:
        """Take over trees as they are, in the order of the roots; servers of depth -1 are still missing."""
        self.own += own
        self.parent += parent
        self.depth += depth
        for nic, count in enumerate(_loads(len(self.load), own, parent)):
            if count:
                self._carry(nic, count)

    def complete(self, tree: int) -> None:
        """Bring all missing servers into a tree, as flat as can be if they do not fit below `max_depth`."""
        if self.standing:
            missing = self._missing[tree]
            self._expect_no_more(missing)
        else:
            missing = [place for place, depth in enumerate(self.depth[tree]) if depth < 0]
        if missing and self._grow(tree, missing, self.max_depth) is None:
            self._grow(tree, missing, len(self.nics.servers), flat=True)

    def _expect_no_more(self, places: list[int]) -> None:
        """These servers are about to come into one tree."""
        for place in places:
            own = self.nics.of[place]
            for nic in own:
                self._expected[nic] -= 1 / len(own)
                self._price[nic] = self._price_at(nic, self.load[nic])

    def over(self) -> list[int]:
        """NICs that carry more than their room, the worst first."""
        excess = [
            (room - load, nic) for nic, (load, room) in enumerate(zip(self.load, self.room, strict=True))
        ]
        return [nic for left, nic in sorted(excess) if left < 0]

    def relieve(self, nic: int, first: int) -> int:
        """Move subtrees off a NIC until it fits, beginning with tree `first`; return how many got cheaper."""
        server = self.nics.owner[nic]
        places = [self.nics.owner[other] for other in self.nics.members[self.nics.group[nic]]]
        improved = 0
        for step in range(len(self.roots)):
            tree = (first + step) % len(self.roots)
            parent = self.parent[tree]
            below = [place for place in places if parent[place] == nic]
            if self.own[tree][server] == nic:
                below.insert(0, server)
            for place in below:
                if self.load[nic] <= self.room[nic]:
                    return improved
                improved += self._move(tree, place)
        return improved

    def _move(self, tree: int, top: int) -> bool:
        """Take a subtree out and bring its servers back one by one; undo unless that costs no more."""
        own, parent, depth = self.own[tree], self.parent[tree], self.depth[tree]
        gone = self._subtree(tree, top)
        before = [(place, own[place], parent[place], depth[place]) for place in gone]
        gain = self._take_out(tree, gone)
        price = self._grow(tree, gone, self.max_depth, most=gain * (1 + _LEVEL_GROUND))
        if price is not None:
            return price < gain * (1 - _LEVEL_GROUND)
        for place, *kept in before:
            own[place], parent[place], depth[place] = kept
            self._carry(kept[0], 1)
            self._carry(kept[1], 1)
        return False

    def _subtree(self, tree: int, top: int) -> list[int]:
        """Return a server and all that hang below it."""
        nics, parent = self.nics, self.parent[tree]
        found = [top]
        for place in found:
            for nic in nics.of[place]:
                below = [nics.owner[other] for other in nics.members[nics.group[nic]]]
                found += [other for other in below if parent[other] == nic]
        return found

    def _take_out(self, tree: int, gone: list[int]) -> float:
        """Remove servers with the edges to their parents; return the price of these edges."""
        own, parent, depth = self.own[tree], self.parent[tree], self.depth[tree]
        gain = 0.0
        for place in gone:
            gain += self._carry(own[place], -1) + self._carry(parent[place], -1)
            own[place] = parent[place] = depth[place] = -1
        return gain

    def _carry(self, nic: int, pieces: int) -> float:
        """Change the load of a NIC; return its price afterwards."""
        self.load[nic] += pieces
        price = self._price[nic] = self._price_at(nic, self.load[nic])
        return price

    def _price_at(self, nic: int, load: int) -> float:
        step = load + round(self._expected[nic]) - self.room[nic]
        if -_STEEPEST <= step <= _STEEPEST:
            return _PRICES[step + _STEEPEST]
        return _PRICES[0 if step < 0 else -1]

    def _grow(
        self, tree: int, missing: list[int], max_depth: int, *, flat: bool = False, most: float = inf
    ) -> float | None:
        """Bring servers into a tree, always the one whose edge is cheapest (Prim), shallower among equals.

        Prices rise while the tree grows. If `flat`, the shallowest goes first and only then the cheapest.

        Returns:
            The price of all new edges; None, and nothing changed, if it would be more than `most`, or if
            some are too many hops away.
        """
        nics, price, depth = self.nics, self._price, self.depth[tree]
        own, parent = self.own[tree], self.parent[tree]
        hubs: dict[int, Hub] = {}
        heap = self._first_offers(tree, missing, max_depth, hubs, flat=flat)
        total = 0.0
        came: list[int] = []
        while heap and len(came) < len(missing):
            _, asked, _, nic, hub = heappop(heap)
            place = nics.owner[nic]
            if depth[place] >= 0:
                continue
            if price[nic] + price[hub] > asked:
                hub, then = hubs[nics.group[nic]]
                # Prices only rise here, so the best parent stays the best until its own has risen.
                if price[hub] > then:
                    hub = self._hub(tree, nics.group[nic], max_depth, flat=flat)
                    hubs[nics.group[nic]] = hub, price[hub]
                heappush(heap, self._offer(depth, nic, hub, flat=flat))
                continue
            total += asked
            if total > most:
                break
            own[place], parent[place] = nic, hub
            depth[place] = depth[nics.owner[hub]] + 1
            self._carry(nic, 1)
            self._carry(hub, 1)
            came.append(place)
            if depth[place] < max_depth:
                self._further_offers(tree, place, hubs, heap, flat=flat)
        self.effort += len(came)
        if len(came) == len(missing):
            return total
        self._take_out(tree, came)
        return None

    def _first_offers(
        self, tree: int, missing: list[int], max_depth: int, hubs: dict[int, Hub], *, flat: bool
    ) -> list[Offer]:
        """Offer every missing server the best parent on each of its NICs; remember them in `hubs`."""
        group, depth = self.nics.group, self.depth[tree]
        offers: list[Offer] = []
        for place in missing:
            for nic in self.nics.of[place]:
                if group[nic] not in hubs:
                    found = self._hub(tree, group[nic], max_depth, flat=flat)
                    hubs[group[nic]] = found, self._price[found] if found >= 0 else inf
                hub, _ = hubs[group[nic]]
                if hub >= 0:
                    offers.append(self._offer(depth, nic, hub, flat=flat))
        heapify(offers)
        return offers

    def _further_offers(
        self, tree: int, place: int, hubs: dict[int, Hub], heap: list[Offer], *, flat: bool
    ) -> None:
        """Offer a newcomer as a parent where it is better than the present one; if `flat`, where none is."""
        nics, price, depth = self.nics, self._price, self.depth[tree]
        for nic in nics.of[place]:
            hub, _ = hubs.get(nics.group[nic], (-1, 0.0))
            if nics.group[nic] not in hubs or (hub >= 0 and (flat or price[nic] >= price[hub])):
                continue
            hubs[nics.group[nic]] = nic, price[nic]
            for other in nics.members[nics.group[nic]]:
                if depth[nics.owner[other]] < 0:
                    heappush(heap, self._offer(depth, other, nic, flat=flat))

    def _offer(self, depth: list[int], nic: int, hub: int, *, flat: bool) -> Offer:
        below = depth[self.nics.owner[hub]]
        return (below if flat else 0, self._price[nic] + self._price[hub], below, nic, hub)

    def _hub(self, tree: int, group: int, max_depth: int, *, flat: bool) -> int:
        """Cheapest NIC of a group that may take a child, if `flat` of the shallowest; -1 if there is none."""
        owner, price, depth = self.nics.owner, self._price, self.depth[tree]
        members = self.nics.members[group]
        if not flat:
            cheapest = min(members, key=price.__getitem__)
            if 0 <= depth[owner[cheapest]] < max_depth:  # most often, and far quicker than to look at all
                return cheapest
        fit = [nic for nic in members if 0 <= depth[owner[nic]] < max_depth]
        if not fit:
            return -1
        if flat:
            return min(fit, key=lambda nic: (depth[owner[nic]], price[nic]))
        return min(fit, key=price.__getitem__)
