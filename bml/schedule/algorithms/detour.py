"""The paper's schedule on a damaged BCube: n-f sets, stand-ins for dead servers, detours for broken hops.

With one dead server x on `bcube:m x 2` the pieces that x would have gathered in its own group go, one
column each, to its surviving neighbours, which send them on by a detour in the next stage. The same
construction is used at every stage for k > 2. Whatever else is broken (links, switches, stand-ins) keeps
its place in the tree and takes a shortest live detour, spread over the relays by load.

Source: the fault handling of the BML paper (see bml.py); for k > 2 our generalisation.
"""

from __future__ import annotations

import numpy as np

from bml.faults.repartition import stand_in
from bml.schedule.algorithms.bml import ThreadTrees, assemble, bml, thread_trees
from bml.schedule.algorithms.hips import hips
from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.drawing import check_room
from bml.schedule.ir.forest import Forest
from bml.schedule.ir.routing import Balance
from bml.topology import BCube, Fabric


@algorithm(
    "bml",
    "detour",
    does="BCube: HiPS with meshes, thread p takes the levels in the order p, p+1, …, the schedule of the "
    "BML papers; elsewhere `hips`",
    damaged="stand-ins gather for the dead server, detours in the next stage",
)
def papers_schedule(fabric: Fabric) -> Forest:
    """Build the schedule of the BML papers: `detour` on a BCube, healthy or not, and `hips` elsewhere.

    Raises:
        FabricError: two survivors are no longer joined by any live path.
        UsageError: the forest would be too large to be built.
    """
    return detour(fabric) if isinstance(fabric.wiring, BCube) else hips(fabric)


def detour(fabric: Fabric) -> Forest:
    """Build the paper's schedule for any damage that leaves the survivors connected.

    On a healthy fabric this is bml. With one dead server the staged GST is m^2/(m^2-1)·T on `bcube:m x 2`
    and 2/(k(n^k-1))·[(n-1)n^(k-1) + (n^k-n)/(n-1)]·T in general; pipelined it is a little less.

    Raises:
        FabricError: two survivors are no longer joined by any live path.
        UsageError: the forest would be too large to be built.
    """
    if not fabric.failures:
        return bml(fabric)
    check_room(fabric, fabric.levels * len(fabric.servers))
    threads = [thread_trees(fabric, thread) for thread in range(fabric.levels)]
    if len(fabric.servers) < fabric.n_servers:
        threads = [_bypass_dead(fabric, one) for one in threads]
    return _relay_broken(fabric, assemble(fabric, threads))


def _bypass_dead(fabric: Fabric, nominal: ThreadTrees) -> ThreadTrees:
    """Give every live server whose parent is dead a live parent at the same or a later stage.

    Siblings send to the stand-in of their dead parent; the stand-in sends to the first live server on the
    dead one's own way to the root. Stages still grow towards the root, so no cycle can arise.
    """
    alive = np.zeros(fabric.n_servers, np.bool_)
    alive[list(fabric.servers)] = True
    parent, stage = nominal.parent.copy(), nominal.stage.copy()
    # The parent of a root is AT_ROOT = -1, which would index the last server: it counts as alive.
    orphans = ~alive[nominal.parent] & alive[None, :] & (nominal.parent >= 0)
    for piece, server in np.argwhere(orphans).tolist():
        dead = int(nominal.parent[piece, server])
        substitute = _stand_in(fabric, nominal, piece, server)
        if substitute != server:
            parent[piece, server] = substitute
            continue
        while not alive[dead]:
            stage[piece, server] = nominal.stage[piece, dead]
            dead = int(nominal.parent[piece, dead])
        parent[piece, server] = dead
    return ThreadTrees(nominal.thread, nominal.roots, parent, stage)


def _stand_in(fabric: Fabric, nominal: ThreadTrees, piece: int, server: int) -> int:
    """Server that gathers this piece in the place of `server`'s dead parent."""
    dead = int(nominal.parent[piece, server])
    level = int(nominal.thread + nominal.stage[piece, server]) % fabric.levels
    onward = int(nominal.thread + nominal.stage[piece, dead]) % fabric.levels
    owner = fabric.address(int(nominal.roots[piece]))
    column = (owner[onward] - fabric.address(dead)[onward]) % fabric.ports
    return stand_in(fabric, dead, level, column)


def _relay_broken(fabric: Fabric, forest: Forest) -> Forest:
    """Replace every hop that no live switch carries by a shortest live detour."""
    piece, server = np.nonzero(forest.parent >= 0)
    parent, level = forest.parent[piece, server], forest.level[piece, server]
    carried = (
        fabric.nics[server, level]
        & fabric.nics[parent, level]
        & (fabric.groups[server, level] == fabric.groups[parent, level])
    )
    if carried.all():
        return forest
    balance = Balance(fabric)
    stage = forest.stage[piece, server]
    balance.add_direct(server[carried], level[carried], parent[carried], stage[carried])
    levels, detours = forest.level.copy(), {}
    for edge in zip(piece[~carried].tolist(), server[~carried].tolist(), strict=True):
        path = balance.choose(edge[1], int(forest.parent[edge]), int(forest.stage[edge]))
        levels[edge] = path[0][1]
        if len(path) > 1:
            detours[edge] = path
    return Forest(forest.root, forest.weight, forest.parent, levels, forest.stage, detours)
