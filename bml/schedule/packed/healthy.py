"""What is left of a BCube's healthy trees when parts of it are broken: in columns, as `Trees` has them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bml.faults.repartition import owners
from bml.schedule.algorithms.bml import digits_of, thread_trees
from bml.schedule.ir.nics import Nics
from bml.schedule.packed.trees import Standing, Trees
from bml.topology import BCube, Fabric

_Array = NDArray[np.int32]
_MOST_MOVED = 64
"""Servers up to which every tree may be changed; of more, only those that are broken."""
_UNEVEN = Fraction(1, 100)
"""By so much more than others a NIC may be loaded so that fewer trees do."""


def cut(nics: Nics, thread: int) -> tuple[_Array, _Array, _Array]:
    """Return the trees of one thread: int32 [tree, place], own, parent and depth."""
    return _cut(nics, thread, owners(nics.fabric, thread))


def is_large(nics: Nics) -> bool:
    """Whether a packing is a large one of a BCube, which `cut_large` cuts.

    Slow NICs break no tree, so they would not be relieved of any.
    """
    return isinstance(nics.fabric.wiring, BCube) and nics.uniform and len(nics.servers) > _MOST_MOVED


def cut_large(nics: Nics, max_depth: int) -> Trees:
    """Return a tree per thread and server, or every n-th server; those that are broken may change.

    NICs have no room yet, and servers are missing in the broken trees.
    """
    fabric = nics.fabric
    place = {server: at for at, server in enumerate(nics.servers)}
    roots = [_roots(fabric, thread) for thread in range(fabric.levels)]
    shape = (sum(map(len, roots)), len(nics.servers))
    tables = [np.empty(shape, np.int32) for _ in range(3)]
    first = 0
    for thread, own_roots in enumerate(roots):
        for table, rows in zip(tables, _cut(nics, thread, own_roots), strict=True):
            table[first : first + len(own_roots)] = rows
        first += len(own_roots)
    own, parent, depth = tables
    changes = np.flatnonzero((depth < 0).any(axis=1))
    places = np.array([place[server] for each in roots for server in each], np.int64)
    return Trees.among(nics, Standing(changes, places, own, parent, depth), max_depth)


def _roots(fabric: Fabric, thread: int) -> tuple[int, ...]:
    """The live servers that own pieces of a thread.

    A server's load in a healthy tree depends on the first digits in which it agrees with the root. Of the
    servers whose digits have the same sum modulo n, equally many agree with it in any k-1 digits. So
    they load all NICs alike, but for the last level of a root itself: n-1 pieces of 2(N-1)/n on each NIC.
    """
    live = owners(fabric, thread)
    if servers_per_root(fabric) == 1:
        return live
    sums = digits_of(fabric).sum(axis=1) % fabric.ports
    return tuple(server for server in live if sums[server] == thread % fabric.ports)


def servers_per_root(fabric: Fabric) -> int:
    """One in so many servers owns pieces of a thread in a large packing: all, or every n-th; see `_roots`."""
    n = fabric.ports
    return n if Fraction(n * (n - 1), 2 * (fabric.n_servers - 1)) <= _UNEVEN else 1


def _cut(nics: Nics, thread: int, roots: tuple[int, ...]) -> tuple[_Array, _Array, _Array]:
    fabric, live = nics.fabric, np.array(nics.servers, np.int64)
    owner, own_level = np.array(nics.owner, np.int64), np.array(nics.level, np.int64)
    number = np.full(fabric.n_servers * fabric.levels, -1, np.int32)
    number[live[owner] * fabric.levels + own_level] = np.arange(len(owner))
    place = np.full(fabric.n_servers, -1, np.int32)
    place[live] = np.arange(len(live))
    healthy = thread_trees(fabric, thread, roots)
    towards = healthy.parent.take(live, axis=1)
    level = ((thread + np.arange(fabric.levels + 1)) % fabric.levels).astype(np.int32)
    level = level.take(healthy.stage.take(live, axis=1), mode="wrap")
    root = towards < 0
    own = number.take(level + (live * fabric.levels).astype(np.int32))
    parent = number.take(level + towards * np.int32(fabric.levels), mode="clip")
    own[root] = parent[root] = -1
    whole = ((own >= 0) & (parent >= 0)) | root
    depth = _healthy_depth(fabric, healthy.roots, live)
    broken = np.flatnonzero(~whole.all(axis=1))
    above, rest = place.take(towards[broken], mode="clip"), whole[broken]
    for _ in range(fabric.levels):
        rest &= np.take_along_axis(rest, above, axis=1) | root[broken]
    for table in (own, parent, depth):
        table[broken] = np.where(rest, table[broken], np.int32(-1))
    return own, parent, depth


def _healthy_depth(fabric: Fabric, roots: _Array, live: NDArray[np.int64]) -> _Array:
    """How deep servers are in healthy trees: in how many digits they differ from the root."""
    digits = digits_of(fabric)
    depth = np.zeros((len(roots), len(live)), np.int32)
    for level in range(fabric.levels):
        depth += digits[roots, level][:, None] != digits[live, level]
    return depth
