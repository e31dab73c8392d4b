"""The search for trees that load all NICs alike, and the proof, found on the way, that it may stop.

We aim at a time, give each NIC room for the whole pieces that it carries in that time, and move subtrees
off NICs that carry more. Where that gets stuck, the NICs that are full are the ones to blame: priced at 1,
all others at 0, they prove a bound (see `bound`) that no packing can beat. If it is not close to what was
reached, we aim in between.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor

from bml.schedule.nics import Nics, price_bound
from bml.schedule.packed_start import start
from bml.schedule.packed_trees import Trees

CLOSE = Fraction(251, 250)
"""This near a proved bound nothing further is tried."""
ROUNDING = Fraction(501, 500)
"""Loss by whole pieces that is not worth more pieces or more time."""
_PASSES = 16
"""Passes over the overloaded NICs for one aim; most often five do."""
_PATIENCE = 3
"""Passes in a row that may bring nothing."""
_AIMS = 8
"""Aims at one depth."""
_DEEPER = (0, 2, 4)
"""Hops that trees may be deeper than planned, if that is too flat for what little is left."""
_FLAT_ENOUGH = Fraction(41, 40)
"""This near a proved bound trees are not made deeper."""
_NEARLY_FULL = (0, 1, 2, 3, 4, 6)
"""A NIC counts as full if it could carry only so many pieces more."""


class Search:
    """The best packing found so far, and the best bound proved so far.

    Attributes:
        nics: where to pack.
        proved: no packing is faster, in T.
        reached: pipelined GST in T of `best`.
        best: trees of one weight.
    """

    best: Trees

    def __init__(self, nics: Nics, proved: Fraction) -> None:
        self.nics = nics
        self.proved = proved
        self.reached: Fraction | None = None

    @property
    def close(self) -> bool:
        """Whether what was reached is near enough to what is proved."""
        return self.reached is not None and self.reached <= self.proved * CLOSE

    def attempt(self, sets: int) -> None:
        """Pack `sets` trees per server as evenly as we can; keep them if they are the best so far."""
        aim = whole_pieces(self.nics, self.proved, sets * len(self.nics.servers))
        trees = start(self.nics, sets, room(self.nics, aim, sets * len(self.nics.servers)))
        flat = trees.max_depth
        self._keep(trees)
        for deeper in _DEEPER:
            trees.max_depth = flat + deeper
            if self._pack(trees) <= self.proved * _FLAT_ENOUGH:
                return

    def _pack(self, trees: Trees) -> Fraction:
        """Even trees out, aiming first at what is proved, then in between; return the best time."""
        pieces = len(trees.roots)
        least = _time(trees)
        low = self.proved
        for _ in range(_AIMS):
            aim = whole_pieces(self.nics, low, pieces)
            trees.set_room(room(self.nics, aim, pieces))
            least = min(least, self._even_out(trees, aim))
            if self.close:
                break
            low = ((self.proved if least <= aim else max(self.proved, aim)) + least) / 2
            if room(self.nics, whole_pieces(self.nics, low, pieces), pieces) == trees.room:
                break
        return least

    def _even_out(self, trees: Trees, aim: Fraction) -> Fraction:
        """Relieve overloaded NICs until all fit, or nearly, or nothing helps; return the best time.

        If it turns out that nobody can reach the aim, that is moved to what is proved.
        """
        least = _time(trees)
        idle = 0
        for turn in range(_PASSES):
            self._learn(trees)
            if self.proved > aim:
                aim = whole_pieces(self.nics, self.proved, len(trees.roots))
                trees.set_room(room(self.nics, aim, len(trees.roots)))
            over = trees.over()
            if not over or least <= aim * ROUNDING or idle == _PATIENCE:
                break
            # Every NIC begins with another tree, so that the same few trees are not bent for all of them.
            improved = [trees.relieve(nic, 7 * turn + 5 * nic) for nic in over]
            # Moves that cost the same go on meanwhile; they may open a way.
            idle = 0 if any(improved) else idle + 1
            least = min(least, self._keep(trees))
        return least

    def _keep(self, trees: Trees) -> Fraction:
        """Remember trees if they are the best so far; return their time."""
        time = _time(trees)
        if self.reached is None or time < self.reached:
            self.reached, self.best = time, trees.copy()
        return time

    def _learn(self, trees: Trees) -> None:
        """Prove what the full NICs prove."""
        full = room(self.nics, _time(trees), len(trees.roots))
        for left in _NEARLY_FULL:
            prices = [int(load >= most - left) for load, most in zip(trees.load, full, strict=True)]
            self.proved = max(self.proved, price_bound(self.nics, prices))


def room(nics: Nics, time: Fraction, pieces: int) -> list[int]:
    """Whole pieces that each NIC carries in a time (in T), P being so many pieces."""
    whole = {rate: floor(time * rate * pieces) for rate in set(nics.rate)}
    return [whole[rate] for rate in nics.rate]


def whole_pieces(nics: Nics, time: Fraction, pieces: int) -> Fraction:
    """Least time in T, not below the given one, in which the NICs have room for all edges in whole pieces."""
    wanted = 2 * (len(nics.servers) - 1) * pieces
    rates = set(nics.rate)
    while sum(room(nics, time, pieces)) < wanted:
        time = min(Fraction(floor(time * rate * pieces) + 1) / (rate * pieces) for rate in rates)
    return time


def _time(trees: Trees) -> Fraction:
    """Pipelined GST in T of the trees, all of one weight."""
    most: dict[Fraction, int] = {}
    for rate, load in zip(trees.nics.rate, trees.load, strict=True):
        most[rate] = max(load, most.get(rate, 0))
    return max((load / rate for rate, load in most.items()), default=Fraction(0)) / len(trees.roots)
