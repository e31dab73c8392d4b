"""HiPS: hierarchical stages over the levels or dimensions, with a flat algorithm inside every group.

In thread p the dimensions are reduced in the order p, p+1, ... (mod h), so that all are busy at once. The
flat algorithm inside a group is a mesh, a ring, or a dedicated parameter server. On BCube with a mesh
inside this is BML; on a torus, where a group is a ring of cables, a ring inside is best, one half of the
vector in each direction: (N-1)/(hN)·T. One switch or a Fat-Tree is one group: 2(N-1)/N·T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bml.schedule.draft import Draft, Way, blank, lay
from bml.schedule.forest import Forest
from faults.repartition import owners
from topology import BCube, Fabric, Torus, UsageError

INSIDE = ("mesh", "ring", "ps")
"""What may follow `hips:`."""


def hips(fabric: Fabric, inside: str = "") -> Forest:
    """Build HiPS with `inside` (mesh, ring or ps) in the groups; nothing means ring on a torus, else mesh.

    On a damaged fabric every survivor owns one of n-f sets per thread, who would send to a dead server
    sends to that one's own peer, and broken hops take live detours.

    Raises:
        UsageError: `inside` is something else.
    """
    if inside not in ("", *INSIDE):
        raise UsageError(f"'hips:{inside}' is not known: write hips, {', '.join(f'hips:{x}' for x in INSIDE)}")
    flat = inside or ("ring" if isinstance(fabric.wiring, Torus) else "mesh")
    grid = _Grid.of(fabric)
    turns = 2 if isinstance(fabric.wiring, Torus) else 1
    drafts = [
        _thread(fabric, grid, flat, thread, turn) for turn in range(turns) for thread in range(grid.dimensions)
    ]
    return lay(fabric, _joined(drafts))


@dataclass(frozen=True, eq=False)
class _Grid:
    """Coordinates of all servers: int64 [server, dimension], each below `size`."""

    size: int
    dimensions: int
    at: NDArray[np.int64]

    @staticmethod
    def of(fabric: Fabric) -> _Grid:
        """Digits of BCube or torus; anything else is one group of one dimension."""
        everyone = np.arange(fabric.n_servers)[:, None]
        match fabric.wiring:
            case BCube(size, dimensions) | Torus(size, dimensions):
                return _Grid(size, dimensions, everyone // size ** np.arange(dimensions) % size)
        return _Grid(fabric.n_servers, 1, everyone)


def _thread(fabric: Fabric, grid: _Grid, flat: str, thread: int, turn: int) -> Draft:
    """Draw one thread's pieces, all with the same turn: routes and rings go forwards if it is 0."""
    roots = owners(fabric, thread % fabric_dimensions(fabric))
    root = np.array(roots[:1] if flat == "ps" else roots, np.int32)
    up, down = blank(len(root), fabric), blank(len(root), fabric)
    # Last stage first: an earlier dimension that also differs overwrites it.
    for order in reversed(range(grid.dimensions)):
        step = _Step(fabric, grid, root, (thread + order) % grid.dimensions, -1 if turn else 1)
        if flat == "ring":
            step.ring(up, down, order)
        else:
            step.mesh(up, order)
    turns = np.full(len(root), turn, np.int8)
    return Draft(root, turns, up, down if flat == "ring" else None)
