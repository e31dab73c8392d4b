"""The search for trees that load all NICs alike, and the proof, found on the way, that it may stop.

We aim at a time, give each NIC room for the whole pieces that it carries in that time, and move subtrees
off NICs that carry more. Where that gets stuck, the NICs that are full are the ones to blame: priced at 1,
all others at 0, they prove a bound (see `bound`) that no packing can beat. If it is not close to what was
reached, we aim in between.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor

from bml.schedule.ir.nics import Nics, cut_bound
from bml.schedule.packed.healthy import cut_large, is_large
from bml.schedule.packed.probe import Edges, blame, probe, rooted
from bml.schedule.packed.start import start
from bml.schedule.packed.trees import Trees

ROUNDING = Fraction(501, 500)
"""Loss by whole pieces that is not worth more pieces or more time."""
_CLOSE = Fraction(251, 250)
"""This near a proved bound nothing further is tried."""
_FAIRLY = Fraction(41, 40)
"""This near finer pieces are tried before other trees are."""
_WELL = Fraction(101, 100)
"""This near no other trees are tried, and no finer pieces."""
_LARGE_ROOM = Fraction(101, 100)
"""In large packings NICs have so many times the room that they need at least: so few are overloaded, …"""
_LARGE_ENOUGH = Fraction(51, 50)
"""… and this near a proved bound nothing further is tried: a step may be waiting."""
_LARGE_EFFORT = 100
"""Servers brought into trees of a large packing, per server of the fabric, those that were missing beside."""
_MOST_MISSING = 250
"""Servers that may be missing in all trees of a large packing, per server of the fabric."""
_PASSES = 10
"""Passes over the overloaded NICs for one aim; most often five do."""
_LOOK_EVERY = 4
"""Passes after which we look what is proved, if something moves at all."""
_PATIENCE = 3
"""Passes in a row that may bring nothing."""
_EFFORT = 600
"""Servers brought into trees, per server of the fabric, after which the search ends: a count and no time,
so that all servers that plan alone end alike. 1000 take about 6 ms in plain Python."""
_FIRST = 300
"""As many of them are for the first attempt."""
_AIMS = 8
"""Aims of one attempt."""
_PROBES = 256
"""Trees of a probe."""
_MOST_PIECES = 400
"""Trees that are tried where fewer do not come close, unless one set is more."""


class TooBroken(Exception):
    """Too much is missing in the trees of a large packing."""


class Search:
    """The best packing found so far, and the best bound proved so far.

    Attributes:
        nics: where to pack.
        proved: no packing is faster, in T.
        reached: pipelined GST in T of `best`.
        best: trees of one weight.
        effort: servers that all attempts brought into trees.
    """

    best: Trees

    def __init__(self, nics: Nics) -> None:
        self.nics = nics
        self.proved = cut_bound(nics)
        self.reached: Fraction | None = None
        self.effort = 0

    def run(self, sets: int) -> Trees:
        """Find trees, `sets` per server if these few come close; finer and other ones where they do not.

        In large packings only broken trees are changed, and no others are tried.
        """
        if is_large(self.nics):
            return self._mend(cut_large(self.nics, self.nics.fabric.levels + 2))
        self._attempt(sets, _FIRST)
        if self._within(_FAIRLY):
            self._refine(sets, _FIRST)
        if not self._within(_WELL):
            edges, proved = probe(self.nics, _PROBES)
            self.proved = max(self.proved, proved)
            self._pack(self._hung_up(edges), _EFFORT)
        if not self._within(_WELL) and not self._is_spent(_EFFORT):
            self._attempt(sets, _EFFORT)
            self._refine(sets, _EFFORT)
        return self.best

    def _refine(self, sets: int, limit: int) -> None:
        """Try more and more trees per server, until what they reach is good or `limit` is spent."""
        while not (self._within(_WELL) or self._is_spent(limit)):
            sets *= 2
            if sets * len(self.nics.servers) > _MOST_PIECES:
                break
            self._attempt(sets, limit)

    @property
    def is_enough(self) -> bool:
        """Whether what was reached is proved to be the best, or near to it where the packing is large."""
        return self._within(_LARGE_ENOUGH if self.best.standing else Fraction(1))

    def _within(self, factor: Fraction) -> bool:
        """Whether what was reached is so near to what is proved."""
        return self.reached is not None and self.reached <= self.proved * factor

    def _is_spent(self, limit: int, trees: Trees | None = None) -> bool:
        """Whether so much effort per server went into all attempts, `trees` being the present one."""
        return self.effort + (trees.effort if trees else 0) >= limit * len(self.nics.servers)

    def _attempt(self, sets: int, limit: int) -> None:
        """Pack `sets` trees per server, about as deep as healthy ones."""
        pieces = sets * len(self.nics.servers)
        aim = whole_pieces(self.nics, self.proved, pieces)
        self._pack(start(self.nics, sets, room(self.nics, aim, pieces)), limit)

    def _mend(self, trees: Trees) -> Trees:
        """Complete the trees of a large packing, and even them out as far as is quick.

        Raises:
            TooBroken: so much is missing in them that it would take long.
        """
        if trees.n_missing > _MOST_MISSING * len(self.nics.servers):
            raise TooBroken
        aim = whole_pieces(self.nics, self.proved * _LARGE_ROOM, trees.pieces)
        trees.set_room(room(self.nics, aim, trees.pieces))
        for tree in range(len(trees.roots)):
            trees.complete(tree)
        self.best, self.reached = trees, _time(trees)
        self.effort = -trees.effort
        for turn in range(_PASSES):
            if self.is_enough or self._is_spent(_LARGE_EFFORT, trees):
                break
            moved = 0
            for nic in trees.over():
                if self._is_spent(_LARGE_EFFORT, trees):
                    break
                moved += trees.relieve(nic, 7 * turn + 5 * nic)
            self.reached = _time(trees)
            if not moved:
                self.proved = max(self.proved, blame(self.nics, trees.load, trees.pieces))
                break
        return trees

    def _hung_up(self, edges: list[Edges]) -> Trees:
        """Make rooted trees of those of a probe."""
        hung = [rooted(self.nics, tree) for tree in edges]
        trees = Trees(self.nics, [root for root, *_ in hung], [0] * len(self.nics.owner), 0)
        for _, *rows in hung:
            trees.add_edges(*rows)
        trees.max_depth = max(max(row) for row in trees.depth)
        return trees

    def _pack(self, trees: Trees, limit: int) -> None:
        """Even trees out, aiming first at what is proved, then in between, until `limit` is spent."""
        pieces = trees.pieces
        least = self._keep(trees)
        low = self.proved
        for _ in range(_AIMS):
            aim = whole_pieces(self.nics, low, pieces)
            trees.set_room(room(self.nics, aim, pieces))
            least = min(least, self._even_out(trees, aim, limit))
            if self._within(_CLOSE) or self._is_spent(limit, trees):
                break
            low = ((self.proved if least <= aim else max(self.proved, aim)) + least) / 2
            if room(self.nics, whole_pieces(self.nics, low, pieces), pieces) == trees.room:
                break
        self.effort += trees.effort

    def _even_out(self, trees: Trees, aim: Fraction, limit: int) -> Fraction:
        """Relieve overloaded NICs until all fit, or nearly, or nothing helps; return the best time.

        If it turns out that the aim cannot be reached, it is moved to the proved bound.
        """
        pieces = trees.pieces
        least = _time(trees)
        idle = 0
        for turn in range(_PASSES):
            if idle or turn % _LOOK_EVERY == _LOOK_EVERY - 1:
                self.proved = max(self.proved, blame(self.nics, trees.load, pieces))
            if self.proved > aim:
                aim = whole_pieces(self.nics, self.proved, pieces)
                trees.set_room(room(self.nics, aim, pieces))
            over = trees.over()
            if not over or least <= aim * ROUNDING or idle == _PATIENCE:
                break
            improved = 0
            for nic in over:
                if self._is_spent(limit, trees):
                    return min(least, self._keep(trees))
                # Every NIC begins with another tree, so that the same few are not bent for all of them.
                improved += trees.relieve(nic, 7 * turn + 5 * nic)
            # Moves that cost the same go on meanwhile; they may open a way.
            idle = 0 if improved else idle + 1
            least = min(least, self._keep(trees))
        return least

    def _keep(self, trees: Trees) -> Fraction:
        """Remember trees if they are the best so far; return their time."""
        time = _time(trees)
        if self.reached is None or time < self.reached:
            self.reached, self.best = time, trees.copy()
        return time


def room(nics: Nics, time: Fraction, pieces: int) -> list[int]:
    """Whole pieces that each NIC carries in a time (in T), P being so many pieces."""
    whole = {rate: floor(time * rate * pieces) for rate in nics.rates}
    return [whole[rate] for rate in nics.rate]


def whole_pieces(nics: Nics, time: Fraction, pieces: int) -> Fraction:
    """Least time in T, not below the given one, in which the NICs have room for all edges in whole pieces."""
    wanted = 2 * (len(nics.servers) - 1) * pieces
    while sum(room(nics, time, pieces)) < wanted:
        time = min(Fraction(floor(time * rate * pieces) + 1) / (rate * pieces) for rate in nics.rates)
    return time


def _time(trees: Trees) -> Fraction:
    """Pipelined GST in T of the trees, all of one weight."""
    if trees.nics.uniform:
        return Fraction(max(trees.load, default=0), trees.pieces)
    most: dict[Fraction, int] = {}
    for rate, load in zip(trees.nics.rate, trees.load, strict=True):
        most[rate] = max(load, most.get(rate, 0))
    return max(load / rate for rate, load in most.items()) / trees.pieces
