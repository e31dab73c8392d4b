"""Binary tree: the whole vector is reduced and broadcast on one tree of the survivors.

The tree is a heap over the survivors in id order. It has the fewest hops for a small vector and the
busiest NICs for a large one: an inner server receives two partials, sends one, and the reverse.
"""

from __future__ import annotations

import numpy as np

from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.drawing import Draft, blank, lay
from bml.schedule.ir.forest import Forest
from bml.topology import Fabric


@algorithm("tree", does="binary tree of whole vectors", damaged="survivors renumbered")
def tree(fabric: Fabric) -> Forest:
    """Build one binary tree of one piece; its root is the lowest live server."""
    live = np.array(fabric.servers, np.int32)
    way = blank(1, fabric)
    child = np.arange(1, len(live))
    parent = (child - 1) // 2
    # Depth of place i is the bit length of i+1, less one; the deepest servers send first.
    depth = np.array([int(place).bit_length() - 1 for place in range(1, len(live) + 1)])
    way.peer[0, live[child]] = live[parent]
    way.stage[0, live[child]] = depth.max() - depth[child]
    return lay(fabric, Draft(live[:1], np.zeros(1, np.int8), way))
