"""Parameter server: one dedicated server adds everything, or the vector is sharded over several.

Every server sends its whole shard straight to the shard's owner and gets the sum back. Source: Li et al.,
"Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.drawing import Draft, blank, check_room, lay
from bml.schedule.ir.forest import AT_ROOT, Forest
from bml.topology import Fabric, UsageError


@algorithm(
    "ps",
    does="one dedicated parameter server, or shards on 4",
    damaged="survivors only, detours",
    argument="[0-9]{1,6}",
    examples=("ps:4",),
    read=int,
)
def ps(fabric: Fabric, shards: int = 1) -> Forest:
    """Build a parameter server on `shards` of the live servers, evenly spaced in id order.

    One shard is the dedicated parameter server: with N workers beside it the staged time is 2N·T. As many
    shards as servers is the mesh.

    Raises:
        UsageError: there are not so many live servers.
    """
    live = fabric.servers
    if not 1 <= shards <= len(live):
        raise UsageError(
            f"ps:{shards} needs {shards} servers, {fabric} has {len(live)}: ask for 1 to {len(live)}"
        )
    return star(fabric, [live[i * len(live) // shards] for i in range(shards)])


def star(fabric: Fabric, roots: Sequence[int], turns: int = 1) -> Forest:
    """Build trees of one level: every server sends straight to the root; `turns` pieces for each root.

    Between servers that are no neighbours the edge is a route through relays; the pieces of one root take
    the different turns that routes may have.
    """
    root = np.repeat(np.array(roots, np.int32), turns)
    check_room(fabric, len(root))
    way = blank(len(root), fabric)
    way.peer[:] = root[:, None]
    way.stage[:] = 0
    pieces = np.arange(len(root))
    way.peer[pieces, root] = AT_ROOT
    way.stage[pieces, root] = -1
    return lay(fabric, Draft(root, (pieces % turns).astype(np.int8), way))
