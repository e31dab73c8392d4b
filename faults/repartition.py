"""n-f repartition: the owners of the pieces when f servers are dead, and the stand-ins that gather for these.

Source: Wang et al., "BML: A High-performance, Low-cost Gradient Synchronization Algorithm for DML Training",
NeurIPS 2018; its fault handling, generalised to any number of dead servers.
"""

from __future__ import annotations

from bml.topology import Fabric, FabricError


def rotated(fabric: Fabric, server: int, thread: int) -> tuple[int, ...]:
    """Digits of a server in the order in which a thread corrects them: a_p, a_(p+1), ... (mod k)."""
    digits = fabric.address(server)
    return digits[thread:] + digits[:thread]


def owners(fabric: Fabric, thread: int) -> tuple[int, ...]:
    """Live servers in the order in which they own the pieces of a thread: n-f sets, none for the dead."""
    return tuple(sorted(fabric.servers, key=lambda server: rotated(fabric, server, thread)))


def stand_in(fabric: Fabric, dead: int, level: int, offset: int) -> int:
    """Live member of a dead server's group that gathers in its place.

    The pieces that the dead server would have gathered go to its surviving neighbours, one column each:
    `offset` (1 .. n-1) is the column, the distance of the owner's digit from the dead server's, and the
    neighbour at the same distance takes it. If that one is dead as well the next one does; one whose NIC
    in the group is alive goes first.

    Raises:
        FabricError: the whole group is dead.
    """
    digits = list(fabric.address(dead))
    ring = []
    for step in range(fabric.ports - 1):
        turn = 1 + (offset - 1 + step) % (fabric.ports - 1)
        digit = (digits[level] + turn) % fabric.ports
        ring.append(fabric.server_at((*digits[:level], digit, *digits[level + 1 :])))
    alive = [server for server in ring if fabric.server_alive(server)]
    if not alive:
        raise FabricError(f"all neighbours of server {dead} at level {level} of {fabric} are dead")
    return next((server for server in alive if fabric.nic_alive(server, level)), alive[0])
