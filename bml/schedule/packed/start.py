"""Trees to start packing from: those of healthy BML with the broken parts cut off, or else flat ones."""

from __future__ import annotations

from bml.faults.repartition import owners
from bml.schedule.ir.nics import Nics
from bml.schedule.packed.healthy import cut
from bml.schedule.packed.trees import Table, Trees
from bml.topology import BCube


def start(nics: Nics, sets: int, room: list[int]) -> Trees:
    """Plant `sets` trees per live server, thread after thread, and bring every server in.

    A changed subtree may hang up to two hops deeper than healthy trees do, or than a root's farthest
    server is.
    """
    threads = [thread % nics.fabric.levels for thread in range(sets)]
    place = {server: at for at, server in enumerate(nics.servers)}
    roots = [place[server] for thread in threads for server in owners(nics.fabric, thread)]
    if isinstance(nics.fabric.wiring, BCube):
        trees = Trees(nics, roots, room, nics.fabric.levels + 2)
        rows = {thread: cut(nics, thread) for thread in set(threads)}
        for thread in threads:
            trees.add_edges(*(table.tolist() for table in rows[thread]))
    else:
        trees = Trees(nics, roots, room, 0)
        for tree, root in enumerate(roots):
            trees.add_edges(*_star(nics, root, tree))
    for tree in range(len(roots)):
        trees.complete(tree)
    if not isinstance(nics.fabric.wiring, BCube):
        trees.max_depth = max(max(depth) for depth in trees.depth) + 2
    return trees


def _star(nics: Nics, root: int, turn: int) -> tuple[Table, Table, Table]:
    """The neighbours of a root; where several NICs lead to one, `turn` picks one. Columns as in `cut`."""
    own, parent, depth = ([[-1] * len(nics.servers)] for _ in range(3))
    depth[0][root] = 0
    first = turn % max(1, len(nics.of[root]))
    for nic in nics.of[root][first:] + nics.of[root][:first]:
        for other in nics.members[nics.group[nic]]:
            place = nics.owner[other]
            if depth[0][place] < 0:
                own[0][place], parent[0][place], depth[0][place] = other, nic, 1
    return own, parent, depth
