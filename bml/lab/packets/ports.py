"""The links of a network, each with the switches at its ends, and the switches with the ports that they have.

A cable that joins two servers, as in a torus, is one link in each direction, and no switch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bml.lab.flows.network import Network, starts
from bml.lab.flows.traffic import Column
from bml.lab.packets.world import NOBODY
from bml.topology import Fabric, FatTree, Graph, Torus
from bml.topology.fattree import LAYERS

Node = tuple[str, int]
"""What a switch is called, and how many ports it has."""


@dataclass(frozen=True, eq=False)
class Ports:
    """Links and switches that some traffic uses, in columns.

    Attributes:
        name: of each link, such as `4/0 out` or `core 3 to aggregation 5`.
        capacity: float64 [link], bytes per second.
        source, target: int32 [link], the switches at its ends; NOBODY for a server.
        path_start: int64 [connection + 1], where the links of a connection begin in `path`.
        path: int32, the links of all connections, in order.
        switch: names.
        ports: int64 [switch], used or not.
    """

    name: list[str]
    capacity: NDArray[np.float64]
    source: Column
    target: Column
    path_start: NDArray[np.int64]
    path: Column
    switch: list[str]
    ports: NDArray[np.int64]


def ports_of(network: Network, fabric: Fabric) -> Ports:
    """Return the links and switches of a network that was made by `bml.lab.flows.network.wire`.

    Raises:
        FabricError: two servers of a Fat-Tree are no longer joined by any path.
    """
    n_links, n_connections = len(network.name), len(network.sender)
    capacity = network.capacity.copy()
    ends = np.full((n_links, 2), NOBODY, np.int32)
    numbers: dict[Node, int] = {}
    is_kept = np.ones(n_links, np.bool_)
    for link in range(n_links):
        connection = int(network.users[network.users_start[link]])
        path = network.path[network.path_start[connection] : network.path_start[connection + 1]]
        nodes = _nodes(connection, network, fabric)
        at = path.tolist().index(link)
        if not nodes:  # out of one server and into another one is one cable
            is_kept[link] = at == 0
            capacity[link] = network.capacity[path].min()
            continue
        known = [numbers.setdefault(node, len(numbers)) for node in nodes]
        ends[link] = [NOBODY, *known][at], [*known, NOBODY][at]
    anew = np.cumsum(is_kept) - 1
    stays = is_kept[network.path]
    connection_of = np.repeat(np.arange(n_connections), np.diff(network.path_start))
    return Ports(
        [name for name, kept in zip(network.name, is_kept.tolist(), strict=True) if kept],
        capacity[is_kept],
        ends[is_kept, 0],
        ends[is_kept, 1],
        starts(connection_of[stays], n_connections),
        anew[network.path[stays]].astype(np.int32),
        [name for name, _ in numbers],
        np.array([ports for _, ports in numbers], np.int64),
    )


def _nodes(connection: int, network: Network, fabric: Fabric) -> list[Node]:
    """Return the switches on the path of a connection, in order."""
    columns = network.sender, network.level, network.receiver
    sender, level, receiver = (int(column[connection]) for column in columns)
    wiring = fabric.wiring
    if isinstance(wiring, FatTree):
        half = wiring.switch_ports // 2
        inner = [node for _, node in fabric.inner_path(sender, receiver)]
        return [(f"{LAYERS[layer]} {at}", wiring.switch_ports) for layer, at in [(0, sender // half), *inner]]
    group = fabric.group(sender, level)
    n_ports = len(fabric.members(level, group))
    if isinstance(wiring, Torus) or (isinstance(wiring, Graph) and n_ports == 2):
        return []
    return [(f"switch {level}/{group}", n_ports)]
