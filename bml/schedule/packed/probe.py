"""A quick look at what packing can reach: cheapest trees one after the other, and what their loads prove.

Every tree is the cheapest when the price of a NIC doubles with every piece per rate that it carries
(multiplicative weights); it may be as deep as it likes. The packing that results is near the optimum on
any fabric, and NICs that are full by then, priced at 1 and all others at 0, most often prove the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bml.schedule.ir.nics import Nics, cheapest_tree, price_bound
from bml.schedule.packed.trees import Table

_STEEPEST = 60
"""Loads that are so far below the highest have one price, 1."""
_NEARLY_FULL = (0, 1, 2, 3, 4, 6, 8, 12)
"""A NIC counts as full if it could carry only so many pieces more."""

Edges = list[tuple[int, int]]
"""A tree: pairs of NICs."""


def probe(nics: Nics, trees: int) -> tuple[list[Edges], Fraction]:
    """Pack so many trees of one weight; return them and a proved bound on the GST of any forest, in T."""
    found: list[Edges] = []
    load = [0] * len(nics.owner)
    proved = Fraction(0)
    pace = [float(1 / rate) for rate in nics.rate]
    for count in range(1, trees + 1):
        use = [int(pieces * each) for pieces, each in zip(load, pace, strict=True)]
        highest = max(use)
        prices = [1 << max(0, _STEEPEST + each - highest) for each in use]
        found.append(cheapest_tree(nics, prices))
        for edge in found[-1]:
            for nic in edge:
                load[nic] += 1
        if count == trees or count & (count - 1) == 0:
            proved = max(proved, price_bound(nics, prices), blame(nics, load, count))
    return found, proved


def blame(nics: Nics, load: Sequence[int], pieces: int) -> Fraction:
    """Bound in T that the full NICs of a packing prove, P being so many pieces."""
    time = max(Fraction(each) / rate for each, rate in zip(load, nics.rate, strict=True))
    most = {rate: int(time * rate) for rate in nics.rates}
    spare = [most[rate] - each for each, rate in zip(load, nics.rate, strict=True)]
    blamed = {tuple(int(left <= limit) for left in spare) for limit in _NEARLY_FULL}
    return max(price_bound(nics, prices) for prices in blamed)


def rooted(nics: Nics, edges: Edges) -> tuple[int, Table, Table, Table]:
    """Hang a tree up at its middle; return the root and rows own, parent and depth as `Trees` has them."""
    joined: list[list[tuple[int, int]]] = [[] for _ in nics.servers]
    for a, b in edges:
        joined[nics.owner[a]].append((a, b))
        joined[nics.owner[b]].append((b, a))
    end = _walk(nics, joined, 0)[0][-1]
    order, _, parent, depth = _walk(nics, joined, end)
    root = order[-1]
    for _ in range(depth[root] // 2):
        root = nics.owner[parent[root]]
    _, own, parent, depth = _walk(nics, joined, root)
    return root, [own], [parent], [depth]


def _walk(
    nics: Nics, joined: list[list[tuple[int, int]]], root: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Servers in the order of their depth below a root, and the rows own, parent and depth."""
    own, parent, depth = ([-1] * len(joined) for _ in range(3))
    depth[root] = 0
    order = [root]
    for place in order:
        for nic, other in joined[place]:
            child = nics.owner[other]
            if depth[child] < 0:
                own[child], parent[child], depth[child] = other, nic, depth[place] + 1
                order.append(child)
    return order, own, parent, depth
