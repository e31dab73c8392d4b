"""Detours: the shortest live paths between two servers whose direct hop is broken or never was."""

from __future__ import annotations

from itertools import islice
from typing import TypeAlias

import networkx as nx

from bml.topology import Fabric, FabricError

Path: TypeAlias = tuple[tuple[int, int, int], ...]
"""Hops (from server, level, to server) in the order of travel."""

MAX_CHOICES = 256
"""Shortest paths looked at per pair of servers: enough to balance over, bounded under heavy damage."""


def shortest_paths(fabric: Fabric, source: int, target: int) -> tuple[Path, ...]:
    """Return shortest live paths from source to target, at most MAX_CHOICES, in a fixed order.

    Raises:
        FabricError: no live path joins the two.
    """
    try:
        found = list(islice(nx.all_shortest_paths(fabric.graph(), source, target), MAX_CHOICES))
    except (nx.NetworkXNoPath, nx.NodeNotFound):
        raise FabricError(
            f"no live path joins servers {source} and {target} of {fabric}: heal a link between them or "
            "go on with one part only"
        ) from None
    return tuple(sorted(_hops(nodes) for nodes in found))


def _hops(nodes: list[int | tuple[int, int]]) -> Path:
    """Turn server, switch, server, ... into hops."""
    servers = [node for node in nodes if isinstance(node, int)]
    levels = [node[0] for node in nodes if isinstance(node, tuple)]
    return tuple(zip(servers[:-1], levels, servers[1:], strict=True))
