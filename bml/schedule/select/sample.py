"""Healthy BML that is too large to be written down: its loads in closed form, and a sample of its trees.

The sample is put together from what every server compiles for itself, so that to verify it is to verify
the servers' own programs.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from bml.schedule.ir.cost import Load
from bml.schedule.ir.forest import AT_ROOT, Forest
from bml.schedule.ir.program import local_bml
from bml.topology import Fabric, InvariantError


def load_of_bml(fabric: Fabric) -> Load:
    """Traffic of every NIC in BML on a healthy BCube, equal to that of its forest: all carry the same."""
    each = np.full((fabric.n_servers, fabric.levels), 2 * (fabric.n_servers - 1), np.int64)
    return Load(each, each, fabric.levels * fabric.n_servers)


def sample_of_bml(fabric: Fabric, count: int) -> Forest:
    """At most `count` trees of BML on a healthy BCube, evenly spread over its pieces, of equal weight.

    Rows are those of the whole forest; parent and level are read from the programs of all servers.
    """
    total = fabric.levels * fabric.n_servers
    pieces = np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64))
    shape = (len(pieces), fabric.n_servers)
    parent, level = np.full(shape, AT_ROOT, np.int32), np.full(shape, -1, np.int8)
    for server in fabric.servers:
        ranges = local_bml(fabric, server).ranges
        starts = [each.start for each in ranges]
        for row, piece in enumerate(pieces.tolist()):
            hop = ranges[bisect_right(starts, piece) - 1].reduce_to
            if hop is not None:
                parent[row, server], level[row, server] = hop.peer, hop.level
    rows, roots = np.nonzero(parent == AT_ROOT)
    if not np.array_equal(rows, np.arange(len(pieces))):
        raise InvariantError(f"not every tree of {fabric} has one root")
    stage = np.where(level < 0, -1, (level - pieces[:, None] // fabric.n_servers) % fabric.levels)
    return Forest(
        roots.astype(np.int32), np.ones(len(pieces), np.int64), parent, level, stage.astype(np.int16)
    )
