"""The links of a fabric as a network with two directions, and the paths of connections over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from bml.lab.flows.traffic import Column, Traffic
from bml.topology import Fabric, FatTree, InnerLink
from bml.topology.fattree import LAYERS

OUT, IN = 0, 1
"""Directions of a NIC's link: from the server, and to it."""


@dataclass(frozen=True, eq=False)
class Network:
    """The links that some traffic uses, and its connections, in columns.

    Attributes:
        name: of each link, such as `4/0 out` or `core 3 to aggregation 5`.
        capacity: float64 [link], bytes per second.
        path_start: int64 [connection + 1], where the links of a connection begin in `path`.
        path: int32, the links of all connections.
        users_start: int64 [link + 1], where the connections of a link begin in `users`.
        users: int32, the connections of all links.
        part: int32 [connection], see `bml.lab.flows.world.World`.
        connection: int32 [node of the traffic], -1 for meetings.
        sender, level, receiver: int32 [connection].
    """

    name: list[str]
    capacity: NDArray[np.float64]
    path_start: NDArray[np.int64]
    path: Column
    users_start: NDArray[np.int64]
    users: Column
    part: Column
    connection: Column
    sender: Column
    level: Column
    receiver: Column


def wire(traffic: Traffic, fabric: Fabric, rate: float, folded: bool = False) -> Network:
    """Lay the connections of some traffic over the links of a fabric whose normal rate is `rate` bytes/s.

    `folded`: the traffic is that of server 0, which stands for all, and comes back to its own NICs.

    Raises:
        FabricError: two servers of a Fat-Tree are no longer joined by any path.
    """
    n_servers, levels = fabric.n_servers, fabric.levels
    sends = traffic.sender >= 0
    key = traffic.sender[sends].astype(np.int64) * levels + traffic.level[sends]
    key = key * n_servers + traffic.receiver[sends]
    unique, index = np.unique(key, return_inverse=True)
    connection = np.full(traffic.n_nodes, -1, np.int32)
    connection[sends] = index
    nic, receiver = np.divmod(unique, n_servers)
    sender, level = np.divmod(nic, levels)
    target = nic if folded else receiver * levels + level
    paths, inner = _paths(fabric, sender, nic, receiver, target)
    used, path = np.unique(paths[1], return_inverse=True)
    names = [_name(int(link), fabric, inner) for link in used]
    capacity = np.array([_capacity(int(link), fabric) for link in used]) * rate
    ends = (each.astype(np.int32) for each in (sender, level, receiver))
    return Network(
        names,
        capacity,
        *sorted_paths(paths[0], path.astype(np.int32), len(unique), len(used)),
        connection,
        *ends,
    )


def _paths(
    fabric: Fabric,
    sender: NDArray[np.int64],
    nic: NDArray[np.int64],
    receiver: NDArray[np.int64],
    target: NDArray[np.int64],
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], list[InnerLink]]:
    """Return (connection, link) of every link of every path, and the inner links, numbered after the NICs."""
    n_nics = fabric.n_servers * fabric.levels
    numbers: dict[InnerLink, int] = {}
    rows: list[int] = []
    links: list[int] = []
    everyone = np.arange(len(nic))
    if isinstance(fabric.wiring, FatTree):
        for at, (source, to) in enumerate(zip(sender.tolist(), receiver.tolist(), strict=True)):
            for link in fabric.inner_path(source, to):
                rows.append(at)
                links.append(2 * n_nics + numbers.setdefault(link, len(numbers)))
    connection = np.concatenate([everyone, np.array(rows, np.int64), everyone])
    over = np.concatenate([nic * 2 + OUT, np.array(links, np.int64), target * 2 + IN])
    return (connection, over), list(numbers)


def _name(link: int, fabric: Fabric, inner: list[InnerLink]) -> str:
    at = link - 2 * fabric.n_servers * fabric.levels
    if at >= 0:
        return " to ".join(f"{LAYERS[layer]} {number}" for layer, number in inner[at])
    server, level = divmod(link // 2, fabric.levels)
    return f"{server}/{level} {'in' if link % 2 == IN else 'out'}"


def _capacity(link: int, fabric: Fabric) -> float:
    if link >= 2 * fabric.n_servers * fabric.levels:
        return 1.0
    return float(fabric.rate(*divmod(link // 2, fabric.levels)))


def sorted_paths(
    connection: NDArray[np.int64], link: Column, n_connections: int, n_links: int
) -> tuple[NDArray[np.int64], Column, NDArray[np.int64], Column, Column]:
    """Sort the pairs (connection, link) both ways, and find the parts."""
    by_connection = np.argsort(connection, kind="stable")
    by_link = np.lexsort((connection, link))
    both = n_links + n_connections
    pairs = np.ones(len(link), np.int8), (link, n_links + connection)
    _, label = connected_components(coo_matrix(pairs, shape=(both, both)), directed=False)
    _, part = np.unique(label[n_links:], return_inverse=True)
    return (
        starts(connection, n_connections),
        link[by_connection],
        starts(link, n_links),
        connection[by_link].astype(np.int32),
        part.astype(np.int32),
    )


def starts(index: NDArray[np.integer], count: int) -> NDArray[np.int64]:
    """Where the entries of each number begin when they are sorted by it: int64 [count + 1]."""
    found = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(index, minlength=count), out=found[1:])
    return found
