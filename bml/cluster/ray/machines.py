"""The machines of a Ray cluster: which ones live, and how an actor is put on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.client import ray as client
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bml.cluster.fleets.placement import Machine, Reservation
from bml.cluster.spec.job import Endpoint, Place
from bml.errors import StartError

_HEAD = "node:__internal_head__"  # Ray adds this to the resources of the node with its head


@dataclass
class Machines:
    """The Ray nodes of the servers, one each: if a node dies, its server dies."""

    places: Mapping[int, Place]
    """The addresses of every server."""
    fault_endpoint: Endpoint
    """Address at which the launcher listens for servers that ask it to break cables."""
    head: str
    """Ray's id of the node with the coordinator."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Ray's ids of the servers' nodes, in their present incarnations."""


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """Return the strategy that puts an actor on the node with this id, and on no other."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def living_machines() -> list[Machine]:
    """Return the nodes that Ray takes to be alive."""
    return [
        Machine(
            node["NodeManagerAddress"],
            node["NodeID"],
            node["Resources"].get("CPU", 0.0),
            _HEAD in node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def own_machine(living: Sequence[Machine]) -> Machine:
    """Return the machine of this process; that with Ray's head if it is on none, as a client of Ray is."""
    if len(living) > 1 and not client.is_connected():
        here = ray.get_runtime_context().get_node_id()
        for each in living:
            if each.node == here:
                return each
    return max(living, key=lambda each: each.is_head)


def room_for(reserves: Reservation, servers: int) -> bool:
    """Whether Ray has free resources now for as many servers."""
    free = ray.available_resources()
    return all(free.get(name, 0.0) >= servers * amount for name, amount in reserves.amounts.items())


def check_room(reserves: Reservation, servers: int) -> None:
    """Raise StartError if a Ray that no machine will ever join has no room for as many servers."""
    if reserves and not room_for(reserves, servers):
        raise StartError(
            f"this machine has no room: each of {servers} servers reserves {reserves}, and its Ray has free "
            f"{ray.available_resources()}"
        )
