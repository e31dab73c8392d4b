"""The machines of a Ray cluster: which ones live, and how an actor is put on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bml.cluster.fleets.placement import Machine, Reservation
from bml.cluster.spec.job import Endpoint, Place
from bml.errors import StartError

_HEAD = "node:__internal_head__"  # Ray adds this to the resources of the node with its head
#: How long a cluster may take to call a function, in seconds.
CALL_S = 5.0

R = TypeVar("R")


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


def on_node(node: str, if_free: bool = False) -> NodeAffinitySchedulingStrategy:
    """Return the strategy that puts an actor on the node with this id.

    On no other, or `if_free`: on another one if this one cannot take it now.
    """
    return NodeAffinitySchedulingStrategy(node, soft=if_free, _spill_on_unavailable=if_free)


def living_machines() -> list[Machine]:
    """Return the nodes that Ray takes to be alive."""
    return [
        Machine(
            node["NodeManagerAddress"],
            node["NodeID"],
            node["Resources"].get("CPU", 0.0),
            _HEAD in node["Resources"],
            node.get("NodeManagerHostname", ""),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def own_machine(living: Sequence[Machine]) -> Machine:
    """Return the machine of this process; that with Ray's head if it is on none, as a client of Ray is."""
    if len(living) > 1 and not is_client():
        here = ray.get_runtime_context().get_node_id()
        for each in living:
            if each.node == here:
                return each
    return max(living, key=lambda each: each.is_head)


def open_machines() -> list[Machine]:
    """Return the living nodes on which Ray still starts something: those that are not draining.

    If a cluster has no time to say which are draining, all are returned.
    """
    draining: Mapping[str, int] = {}
    with suppress(RayError):
        draining = draining_nodes()
    return [each for each in living_machines() if each.node not in draining]


def draining_nodes() -> dict[str, int]:
    """Return the ids of the nodes that are draining, each with the time at which it ends.

    That is in ms since 1970, and 0 if it is not known.
    """
    return in_cluster(_draining)


def _draining() -> dict[str, int]:
    from ray._private.state import state  # Ray 2.60 has no public name for it

    nodes: dict[str, int] = state.get_draining_nodes()
    return nodes


def is_client() -> bool:
    """Whether this process is a client of Ray: a call then is a task on the cluster."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def in_cluster(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function here, or on the cluster if this process is a client of Ray, outside of the cluster."""
    if not is_client():
        return function(*arguments)
    task = ray.remote(num_cpus=0)(function)
    returned: R = ray.get(task.remote(*arguments), timeout=CALL_S)
    return returned


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
