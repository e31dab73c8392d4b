"""Counts that no schedule of a kind can be below, found without making one.

They are at most those of the schedule, count by count. So, with any constants, the modelled time of a
schedule is no shorter than that of these counts, in floating point, too.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bml.schedule.algorithms.exchange import part_of
from bml.schedule.ir.nics import cut_bound, number_nics
from bml.schedule.select.model import Counts, counts, crowd
from bml.topology import BCube, Fabric, FabricError, Graph

_MOST_ASKED = 256
"""Servers of the largest graph of which it is found out whether all are neighbours."""


class _Shape(NamedTuple):
    """Hops between the live servers of a fabric, and the least pipelined GST of trees in T."""

    radius: int
    diameter: int
    hops: int
    """Hops of the shortest paths of all ordered pairs together."""
    wire: Fraction
    rate: Fraction
    """Rates of all usable NICs together."""
    slowest: Fraction
    """Rates of all NICs of the server where they are least."""


def least_of_trees(fabric: Fabric) -> Counts:
    """Return the least counts of any forest for the live servers of a connected fabric.

    A partial climbs at least as many hops as its server is away from the root, and the result comes down as
    many. Every tree of N servers adds N-1 partials and touches memory at least as a star does.
    """
    shape, live = _shape(fabric), len(fabric.servers)
    if live < 2:
        return Counts(0, Fraction(0), Fraction(0), Fraction(0), Fraction(0))
    return Counts(
        2 * shape.radius, shape.wire, Fraction(live - 1, live), Fraction(live + 1, live), Fraction(0)
    )


def least_of_mesh(fabric: Fabric) -> Counts:
    """Return the least counts of the mesh: every server is a root, and every pair talks twice."""
    shape, live = _shape(fabric), len(fabric.servers)
    least = least_of_trees(fabric)
    if live < 2:
        return least
    alone = Fraction(2 * (live - 1), live) / shape.slowest
    together = Fraction(2 * shape.hops, live) / shape.rate
    return Counts(
        rounds=2 * shape.diameter,
        wire=max(shape.wire, alone, together),
        added=least.added,
        touched=least.touched,
        incast=Fraction(crowd(live - 1), live),
    )


def least_of_exchange(fabric: Fabric) -> Counts | None:
    """Return the counts of one server of the exchange; None if it is seen at once that it cannot work.

    The servers of a graph are not alike: all of them are asked, if there are not too many.
    """
    is_graph = isinstance(fabric.wiring, Graph)
    if is_graph and len(fabric.servers) > _MOST_ASKED:
        return None
    asked = fabric.servers if is_graph else fabric.servers[:1]
    try:
        found = [counts(part_of(fabric, server), fabric) for server in asked]
    except FabricError:
        return None
    return found[0]


@lru_cache(maxsize=32)
def _shape(fabric: Fabric) -> _Shape:
    if isinstance(fabric.wiring, BCube) and not fabric.failures and not fabric.rates:
        return _shape_of_bcube(fabric.wiring)
    nics = number_nics(fabric)
    away = _distances(fabric)
    farthest = away.max(axis=1)
    rates = [sum((nics.rate[nic] for nic in own), Fraction(0)) for own in nics.of]
    return _Shape(
        radius=int(farthest.min()),
        diameter=int(farthest.max()),
        hops=int(away.sum()),
        wire=cut_bound(nics),
        rate=sum(rates, Fraction(0)),
        slowest=min(rates),
    )


def _shape_of_bcube(wiring: BCube) -> _Shape:
    """The same of a healthy BCube, where a digit that differs is a hop, without looking at every pair."""
    n, k, servers = wiring.ports, wiring.levels, wiring.n_servers
    return _Shape(
        radius=k,
        diameter=k,
        hops=servers * servers * k * (n - 1) // n,
        wire=max(Fraction(2 * (servers - 1), k * servers), Fraction(1, k)),
        rate=Fraction(k * servers),
        slowest=Fraction(k),
    )


def _distances(fabric: Fabric) -> NDArray[np.int64]:
    """Hops of a shortest live path between any two live servers of a connected fabric: int64 [live, live]."""
    live = list(fabric.servers)
    nics, groups = fabric.nics[live], fabric.groups[live]
    joined = (groups[:, None] == groups[None]) & nics[:, None] & nics[None]
    near = joined.any(axis=2).astype(np.float32)
    away = np.zeros((len(live), len(live)), np.int64)
    reached = np.eye(len(live), dtype=np.bool_)
    while not reached.all():
        away[~reached] += 1
        reached |= reached.astype(np.float32) @ near > 0
    return away
