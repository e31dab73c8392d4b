"""Packed spanning trees: on whatever is left of a fabric, trees that load all NICs alike.

No server merely relays: one that passes a partial sum on adds its own first. Both phases use the same trees
and run at the same time. So the cost depends only on how often each NIC is in a tree (see `packed_trees`),
and the least possible maximum is what `bound` computes. We start from healthy trees, mend only what is broken
and then move subtrees off overloaded NICs. In a large packing a failure breaks a part of the trees only; no
others are touched.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from bml.schedule.algorithms.bml import bml
from bml.schedule.algorithms.detour import detour
from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.cost import gst
from bml.schedule.ir.forest import AT_ROOT, NOT_THERE, Forest
from bml.schedule.ir.nics import Nics, cut_bound, number_nics
from bml.schedule.packed.healthy import servers_per_root
from bml.schedule.packed.search import ROUNDING, Search, TooBroken, whole_pieces
from bml.schedule.packed.symmetry import representative, without_repeats
from bml.schedule.packed.trees import Standing, Trees
from bml.topology import BCube, Fabric, FabricError, ServerFailure

_KEPT_PLANS = 32
"""Forests kept for the next time; a healthy BCube needs three for all its single failures."""
_MOST_KEPT = 256
"""Servers of a fabric up to which they are kept: the trees of 1024 have up to 40 MB."""
_PIECES = (60, 200)
"""Number of trees, unless one tree per server and NIC is more: finer pieces let loads even out better."""
_MOST_ENTRIES = 1 << 23
"""Servers squared times levels: the entries of one table of one tree per server and NIC."""


@algorithm(
    "packed",
    does="spanning trees on what is left, every hop between neighbours and every relay adding its own "
    "partial; starts from healthy trees, regrows what is broken, moves subtrees off busy NICs",
    damaged="that is what it is for; the default for long vectors",
)
def packed(fabric: Fabric) -> Forest:
    """Pack spanning trees into the live NICs of a connected fabric; on a healthy plain BCube this is bml.

    The same input gives the same forest everywhere. Failures that BCube's symmetry maps onto one another
    share one plan, kept after the first time.

    Raises:
        FabricError: some live server has no usable NIC while others live, or the fabric is too large.
    """
    if not fits(fabric):
        raise FabricError(f"{fabric.name} is too large to be packed: ask for detour, or for hips")
    case, symmetry = representative(without_repeats(fabric))
    forest = _plan(case) if fabric.n_servers <= _MOST_KEPT else _made(case)
    return symmetry.apply(forest) if symmetry else forest


def fits(fabric: Fabric) -> bool:
    """Whether a fabric is small enough to be packed in memory and in time (2000 servers with two NICs)."""
    fewer = servers_per_root(fabric) if isinstance(fabric.wiring, BCube) and not fabric.rates else 1
    return fabric.n_servers**2 * fabric.levels // fewer <= _MOST_ENTRIES


@lru_cache(maxsize=_KEPT_PLANS)
def _plan(fabric: Fabric) -> Forest:
    return _made(fabric)


def _made(fabric: Fabric) -> Forest:
    forest = _best(fabric)
    for column in (forest.root, forest.weight, forest.parent, forest.level, forest.stage):
        column.setflags(write=False)
    return forest


def _best(fabric: Fabric) -> Forest:
    if isinstance(fabric.wiring, BCube) and not fabric.failures and not fabric.rates:
        return bml(fabric)
    nics = number_nics(fabric)
    search = Search(nics)
    try:
        trees = search.run(_sets(nics, cut_bound(nics)))
    except TooBroken:
        return detour(fabric)
    forest = _forest(nics, trees)
    if search.is_enough or not _may_do_better(fabric):
        return forest
    paper = detour(fabric)
    return paper if gst(paper, fabric) < gst(forest, fabric) else forest


def _may_do_better(fabric: Fabric) -> bool:
    """Whether the paper's schedule has a chance: with a link or a switch lost it takes far longer."""
    only_servers = all(isinstance(failure, ServerFailure) for failure in fabric.failures)
    return isinstance(fabric.wiring, BCube) and only_servers


def _sets(nics: Nics, target: Fraction) -> int:
    """Choose how many trees each server owns: the fewest whose whole pieces come close to the target."""
    servers = len(nics.servers)
    threads = max((len(own) for own in nics.of), default=1) or 1
    least = max(threads, ceil(_PIECES[0] / servers))
    losses = []
    for sets in range(least, max(least, _PIECES[1] // servers) + 1):
        reached = whole_pieces(nics, target, sets * servers)
        losses.append((reached / target - 1 if target else Fraction(0), sets))
        if losses[-1][0] <= ROUNDING - 1:
            return sets
    return min(losses)[1]


def _forest(nics: Nics, trees: Trees) -> Forest:
    """Write trees down in columns; equal ones become one piece of their common weight."""
    if trees.standing:
        return _among(nics, trees, trees.standing)
    weight: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
    first: list[int] = []
    for tree, root in enumerate(trees.roots):
        key = (tuple(trees.own[tree]), tuple(trees.parent[tree]), root)
        if key not in weight:
            first.append(tree)
        weight[key] = weight.get(key, 0) + 1
    own, parent, depth = (
        np.array([table[tree] for tree in first], np.int32)
        for table in (trees.own, trees.parent, trees.depth)
    )
    roots, weights = np.array([trees.roots[tree] for tree in first]), np.array([*weight.values()], np.int64)
    return _columns(nics, roots, weights, own, parent, depth)


def _among(nics: Nics, trees: Trees, standing: Standing) -> Forest:
    """Write down trees that changed among those that did not, each in its place; all are different."""
    columns = []
    for all_rows, changed in (
        (standing.own, trees.own), (standing.parent, trees.parent), (standing.depth, trees.depth)
    ):  # fmt: skip
        columns.append(all_rows.copy())
        columns[-1][standing.changes] = np.array(changed, np.int32).reshape(len(changed), all_rows.shape[1])
    return _columns(nics, standing.roots, np.ones(trees.pieces, np.int64), *columns)


def _columns(
    nics: Nics,
    roots: NDArray[np.int64],
    weights: NDArray[np.int64],
    own: NDArray[np.int32],
    parent: NDArray[np.int32],
    depth: NDArray[np.int32],
) -> Forest:
    """The forest of these trees; tables as in `Trees`, [tree, place]."""
    live = np.array(nics.servers, np.int32)
    shape = (len(roots), nics.fabric.n_servers)
    parents, level = np.full(shape, NOT_THERE, np.int32), np.full(shape, -1, np.int8)
    stage = np.full(shape, -1, np.int16)
    at_root = own < 0
    owner, of_level = live[np.array([*nics.owner, 0])], np.array([*nics.level, -1], np.int8)
    parents[:, live] = np.where(at_root, np.int32(AT_ROOT), owner[parent])
    level[:, live] = of_level[own]
    stage[:, live] = np.where(at_root, -1, depth.max(initial=0) - depth)
    return Forest(live[roots], weights, parents, level, stage)
