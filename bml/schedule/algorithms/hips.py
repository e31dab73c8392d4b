"""HiPS: hierarchical stages over the levels or dimensions, with a flat algorithm inside every group.

In thread p the dimensions are reduced in the order p, p+1, ... (mod h), so that all are busy at once. The
flat algorithm inside a group is a mesh, a ring, or a dedicated parameter server. On BCube with a mesh
inside this is BML; on a torus, where a group is a ring of cables, a ring inside is best, one half of the
vector in each direction: (N-1)/(hN)·T. One switch or a Fat-Tree is one group: 2(N-1)/N·T. With `tiers` a
Fat-Tree has three stages, meshes of the servers of an edge switch, of the edge switches of a pod, and of the
pods. That is as many bytes over a server's NIC, but of them only one part in s leaves an edge switch of s
servers, and one in s² a pod.

Source: Geng, Li, Cheng, Wang, Li: "HiPS: Hierarchical Parameter Synchronization in Large-Scale Distributed
Machine Learning", NetAI 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from bml.faults.repartition import owners
from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.drawing import Draft, Way, blank, check_room, lay
from bml.schedule.ir.forest import Forest
from bml.topology import BCube, Fabric, FatTree, Torus, UsageError

INSIDE = ("mesh", "ring", "ps", "tiers")
"""The words that may follow `hips:`."""


@algorithm(
    "hips",
    does="stages over levels or dimensions, all at once, a flat algorithm inside the groups; plain `hips` "
    "has rings on a torus, else meshes; `hips:tiers` has stages over edge switches, pods and core of a whole "
    "Fat-Tree",
    damaged="n−f sets; data for a dead server goes to that server's partner",
    argument="|".join(INSIDE),
    examples=("hips:ring", "hips:mesh", "hips:ps"),
)
def hips(fabric: Fabric, inside: str = "", roots: Sequence[int] | None = None) -> Forest:
    """Build HiPS with `inside` (mesh, ring or ps) in the groups; nothing means ring on a torus, else mesh.

    `tiers` are meshes whose groups are those of a Fat-Tree; a healthy one has all servers that it has places
    for.

    `roots`: only the pieces of these owners, in every thread.

    On a damaged fabric every survivor owns one of n-f sets per thread. Data for a dead server goes to that
    server's partner, the one to which it would have sent the sum itself. Broken hops take live detours.

    Raises:
        UsageError: `inside` is something else or does not fit the fabric, or the forest would be too large to
            be built.
    """
    if inside not in ("", *INSIDE):
        raise UsageError(
            f"'hips:{inside}' is not known: write hips, {', '.join(f'hips:{x}' for x in INSIDE)}"
        )
    flat = inside or ("ring" if isinstance(fabric.wiring, Torus) else "mesh")
    grid = _Grid.of_tiers(fabric) if inside == "tiers" else _Grid.of(fabric)
    turns = 2 if isinstance(fabric.wiring, Torus) else 1
    if roots is None:
        pieces = turns * grid.threads * (1 if flat == "ps" else len(fabric.servers))
        check_room(fabric, pieces * (2 if flat == "ring" else 1))
    drafts = [
        _thread(fabric, grid, flat, thread, turn, roots or owners(fabric, thread))
        for turn in range(turns)
        for thread in range(grid.threads)
    ]
    return lay(fabric, _joined(drafts))


@dataclass(frozen=True, eq=False)
class _Grid:
    """Coordinates of all servers: int64 [server, dimension], each below the size of its dimension.

    A server's number has them as digits, the first one lowest. `threads`: as many as there are NICs.
    """

    sizes: tuple[int, ...]
    threads: int
    at: NDArray[np.int64]

    @property
    def dimensions(self) -> int:
        return len(self.sizes)

    def low(self, dimension: int) -> int:
        """By how much the numbers of neighbours in a dimension differ."""
        return prod(self.sizes[:dimension])

    @staticmethod
    def of(fabric: Fabric) -> _Grid:
        """Digits of BCube or torus; anything else is one group of one dimension."""
        match fabric.wiring:
            case BCube(size, dimensions) | Torus(size, dimensions):
                return _Grid._numbered((size,) * dimensions, dimensions)
        return _Grid._numbered((fabric.n_servers,), 1)

    @staticmethod
    def of_tiers(fabric: Fabric) -> _Grid:
        """The place at an edge switch, the edge switch in its pod, the pod. Raises UsageError for others."""
        wiring = fabric.wiring
        if isinstance(wiring, FatTree):
            sizes = wiring.switch_ports // 2, wiring.switch_ports // 2, wiring.switch_ports
            if prod(sizes) == fabric.n_servers:
                return _Grid._numbered(sizes, 1)
        raise UsageError(
            f"hips:tiers needs a Fat-Tree with all its servers, such as fattree:10, not {fabric.name}: "
            "ask for hips"
        )

    @staticmethod
    def _numbered(sizes: tuple[int, ...], threads: int) -> _Grid:
        lows = [prod(sizes[:dimension]) for dimension in range(len(sizes))]
        return _Grid(sizes, threads, np.arange(prod(sizes))[:, None] // lows % sizes)


def _thread(fabric: Fabric, grid: _Grid, flat: str, thread: int, turn: int, roots: Sequence[int]) -> Draft:
    """Draw one thread's pieces, all with the same turn: routes and rings go forwards if it is 0."""
    root = np.array(roots[:1] if flat == "ps" else roots, np.int32)
    reduce, broadcast = blank(len(root), fabric), blank(len(root), fabric)
    # Last stage first: an earlier dimension that also differs overwrites it.
    for order in reversed(range(grid.dimensions)):
        dimension = (thread + order) % grid.dimensions
        if flat == "ring":
            _ring_stage(fabric, grid, root, reduce, broadcast, dimension, order, -1 if turn else 1)
        else:
            _mesh_stage(grid, root, reduce, dimension, order)
    turns = np.full(len(root), turn, np.int8)
    return Draft(root, turns, reduce, broadcast if flat == "ring" else None)


def _mesh_stage(grid: _Grid, root: NDArray[np.int32], reduce: Way, dimension: int, order: int) -> None:
    """A server whose digit differs from the root's in this dimension sends to the member that has it."""
    own, wanted = grid.at[None, :, dimension], grid.at[root, dimension][:, None]
    parent = np.arange(len(grid.at)) + (wanted - own) * grid.low(dimension)
    np.copyto(reduce.peer, parent, where=wanted != own, casting="same_kind")
    reduce.stage[wanted != own] = order


def _ring_stage(
    fabric: Fabric,
    grid: _Grid,
    root: NDArray[np.int32],
    reduce: Way,
    broadcast: Way,
    dimension: int,
    order: int,
    direction: int,
) -> None:
    """Partial sums go round the group to the member with the root's digit; results go on the same way."""
    low, size, servers = grid.low(dimension), grid.sizes[dimension], np.arange(len(grid.at))
    own, wanted = grid.at[None, :, dimension], grid.at[root, dimension][:, None]
    differs = wanted != own
    # Places after the root's, in the direction of travel: 0 is the first that results come to.
    place = ((own - wanted) * direction - 1) % size
    length = size - 1
    ahead = servers + ((grid.at[:, dimension] + direction) % size - grid.at[:, dimension]) * low
    behind = servers + ((grid.at[:, dimension] - direction) % size - grid.at[:, dimension]) * low
    leaves = _levels(fabric, servers, dimension, direction)
    for way, peer, level, stage in (
        (reduce, ahead, leaves, order * length),
        (broadcast, behind, leaves[behind], (grid.dimensions - 1 - order) * length),
    ):
        np.copyto(way.peer, peer[None, :], where=differs, casting="same_kind")
        np.copyto(way.level, level[None, :], where=differs, casting="same_kind")
        np.copyto(way.stage, stage + place, where=differs, casting="same_kind")


def _levels(
    fabric: Fabric, servers: NDArray[np.int64], dimension: int, direction: int
) -> NDArray[np.integer]:
    """NIC on which each server leaves for the next one of its group."""
    wiring = fabric.wiring
    if isinstance(wiring, Torus):
        return np.array([wiring.step(server, dimension, direction)[1] for server in servers.tolist()])
    return np.full(len(servers), dimension)


def _joined(drafts: list[Draft]) -> Draft:
    """Put the pieces of all drafts below one another."""
    broadcasts = [draft.broadcast for draft in drafts if draft.broadcast]
    return Draft(
        np.concatenate([draft.root for draft in drafts]),
        np.concatenate([draft.turn for draft in drafts]),
        _stacked([draft.reduce for draft in drafts]),
        _stacked(broadcasts) if broadcasts else None,
    )


def _stacked(ways: list[Way]) -> Way:
    return Way(
        np.concatenate([way.peer for way in ways]),
        np.concatenate([way.stage for way in ways]),
        np.concatenate([way.level for way in ways]),
    )
