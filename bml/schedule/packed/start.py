"""Trees to start packing from: those of healthy BML with the broken parts cut off, or else flat ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bml.faults.repartition import owners
from bml.schedule.algorithms.bml import thread_trees
from bml.schedule.ir.nics import Nics
from bml.schedule.packed.trees import Standing, Table, Trees
from bml.topology import BCube, Fabric

_Array = NDArray[np.int32]
_MOST_MOVED = 1 << 16
"""Servers in all trees together up to which every tree may be changed; beyond, only those that are broken.
Slow NICs break no tree, so they are relieved of any."""


def start(nics: Nics, sets: int, room: list[int]) -> Trees:
    """Plant `sets` trees per live server, thread after thread, and bring every server in.

    A changed subtree may hang up to two hops deeper than healthy trees do, or than a root's farthest
    server is.
    """
    threads = [thread % nics.fabric.levels for thread in range(sets)]
    place = {server: at for at, server in enumerate(nics.servers)}
    roots = [place[server] for thread in threads for server in owners(nics.fabric, thread)]
    if isinstance(nics.fabric.wiring, BCube):
        trees = _mended(nics, threads, roots, room)
    else:
        trees = Trees(nics, roots, room, 0)
        for tree, root in enumerate(roots):
            trees.add_edges(*_star(nics, root, tree))
    for tree in range(len(trees.roots)):
        trees.complete(tree)
    if not isinstance(nics.fabric.wiring, BCube):
        trees.max_depth = max(max(depth) for depth in trees.depth) + 2
    return trees


def _mended(nics: Nics, threads: list[int], roots: list[int], room: list[int]) -> Trees:
    """Healthy trees of these threads, cut where they are broken; in large packings all others stand."""
    max_depth = nics.fabric.levels + 2
    shape = (len(roots), len(nics.servers))
    own, parent, depth = (np.empty(shape, np.int32) for _ in range(3))
    for at, thread in enumerate(threads):
        rows = slice(at * len(nics.servers), (at + 1) * len(nics.servers))
        _cut(nics, thread, own[rows], parent[rows], depth[rows])
    if own.size > _MOST_MOVED and nics.uniform:
        changes = np.flatnonzero((depth < 0).any(axis=1))
        return Trees.among(nics, Standing(changes, np.array(roots), own, parent, depth), room, max_depth)
    trees = Trees(nics, roots, room, max_depth)
    trees.add_edges(own.tolist(), parent.tolist(), depth.tolist())
    return trees


def _star(nics: Nics, root: int, turn: int) -> tuple[Table, Table, Table]:
    """The neighbours of a root; where several NICs lead to one, `turn` picks one. Columns as in `_cut`."""
    own, parent, depth = ([[-1] * len(nics.servers)] for _ in range(3))
    depth[0][root] = 0
    first = turn % max(1, len(nics.of[root]))
    for nic in nics.of[root][first:] + nics.of[root][:first]:
        for other in nics.members[nics.group[nic]]:
            place = nics.owner[other]
            if depth[0][place] < 0:
                own[0][place], parent[0][place], depth[0][place] = other, nic, 1
    return own, parent, depth


def _cut(nics: Nics, thread: int, own: _Array, parent: _Array, depth: _Array) -> None:
    """Write down what is left of one thread's healthy trees: rows own, parent and depth of `Trees`."""
    fabric, live = nics.fabric, np.array(nics.servers, np.int64)
    number = np.full(fabric.n_servers * fabric.levels, -1, np.int32)
    owner, own_level = np.array(nics.owner, np.int64), np.array(nics.level, np.int64)
    number[live[owner] * fabric.levels + own_level] = np.arange(len(owner))
    place = np.full(fabric.n_servers, -1, np.int32)
    place[live] = np.arange(len(live))
    healthy = thread_trees(fabric, thread)
    towards = healthy.parent.take(live, axis=1)
    level = ((thread + np.arange(fabric.levels + 1)) % fabric.levels).astype(np.int32)
    level = level.take(healthy.stage.take(live, axis=1), mode="wrap")
    root = towards < 0
    number.take(level + (live * fabric.levels).astype(np.int32), out=own, mode="clip")
    number.take(level + towards * np.int32(fabric.levels), out=parent, mode="clip")
    own[root] = parent[root] = -1
    whole = ((own >= 0) & (parent >= 0)) | root
    _healthy_depth(fabric, healthy.roots, live, depth)
    broken = np.flatnonzero(~whole.all(axis=1))
    above, rest = place.take(towards[broken], mode="clip"), whole[broken]
    for _ in range(fabric.levels):
        rest &= np.take_along_axis(rest, above, axis=1) | root[broken]
    for table in (own, parent, depth):
        table[broken] = np.where(rest, table[broken], np.int32(-1))


def _healthy_depth(fabric: Fabric, roots: _Array, live: NDArray[np.int64], depth: _Array) -> None:
    """Write down how deep servers are in healthy trees: in how many digits they differ from the root."""
    digits = np.array([fabric.address(server) for server in range(fabric.n_servers)], np.int16)
    depth[:] = 0
    for level in range(fabric.levels):
        depth += digits[roots, level][:, None] != digits[live, level]
