"""How long a step takes packet by packet, and what its switches do meanwhile: queues, pauses, marks. Pure.

The transfers, what waits for what and the paths are those of `bml.lab.flows`. What is modelled besides:
packets that are received whole before they are sent on, one queue for each port, buffers that the ports of a
switch share, pause frames (PFC), marks (ECN) and the rate control of NICs (DCQCN). What is not: losses,
headers, several priorities, processors, the barrier at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bml.errors import InvariantError
from bml.lab.flows.network import Network, starts, wire
from bml.lab.flows.simulate import Conditions, traffic_of
from bml.lab.flows.traffic import Column, Traffic
from bml.lab.packets.events import (
    CROSSED,
    DISORDERED,
    DONE,
    EVENTS,
    FIRST,
    FREE,
    FULL,
    MARKED,
    N_FREE,
    NOTIFIED,
    RECEIVED,
    SENDING,
    TOUCHED,
    run,
)
from bml.lab.packets.ports import Ports, ports_of
from bml.lab.packets.settings import Settings
from bml.lab.packets.world import CONNECTION, ENTRY, LINK, NOBODY, PACKET, SWITCH, TRANSFER, Records, World
from bml.schedule import Plan
from bml.topology import Fabric, UsageError

MOST_CROSSINGS = 100_000_000
"""Packets over links that are simulated: about a minute."""
CROSSINGS_PER_S = 1.7e6
"""Of them in a second, the least that was measured, on a machine with other work; for messages only."""
_AT_ONCE = 2_000_000
"""Events between two reports of progress."""

Progress = Callable[[float], None]
"""Is told the share of packets that have crossed their links, 0 to 1."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step of packets did.

    Attributes:
        seconds: from its beginning to the arrival of the last result.
        arrived: float64 [node of the traffic], seconds.
        ports: links and switches.
        n_packets: packets that were sent, all received in order.
        n_crossings: packets over links.
        n_events: what happened, one after the other; the time of a simulation grows with them.
        n_marked: packets that a switch marked.
        n_notified: notifications from receivers to senders.
        pauses: int64 [link], how often the switch at its end paused it.
        paused_s: float64 [link], seconds for which it was paused.
        most_queued: float64 [link], the longest queue for it in a switch, bytes.
        most_held: float64 [switch], the most bytes in it.
        buffer_nbytes: float64 [switch].
    """

    seconds: float
    arrived: NDArray[np.float64]
    ports: Ports
    n_packets: int
    n_crossings: int
    n_events: int
    n_marked: int
    n_notified: int
    pauses: NDArray[np.int64]
    paused_s: NDArray[np.float64]
    most_queued: NDArray[np.float64]
    most_held: NDArray[np.float64]
    buffer_nbytes: NDArray[np.float64]


def simulate(
    plan: Plan, conditions: Conditions, settings: Settings, seed: int = 0, progress: Progress | None = None
) -> Outcome:
    """Simulate one step of a plan; all servers, as their packets meet in the queues of switches.

    Of the conditions `delay_s` and `tolerance` are not used: the settings have the delay of a cable. `seed`
    is that of marks and of turns; that of ECMP belongs to the fabric.

    Raises:
        FabricError: the plan's algorithm cannot work on its fabric.
        UsageError: the transfers would not fit into memory, the packets would take too long, or a buffer has
            no room beside the headroom.
    """
    traffic, _ = traffic_of(plan, replace(conditions, whole=True))
    return play(traffic, plan.fabric, conditions, settings, seed, progress)


def play(
    traffic: Traffic,
    fabric: Fabric,
    conditions: Conditions,
    settings: Settings,
    seed: int = 0,
    progress: Progress | None = None,
) -> Outcome:
    """Let some traffic happen on a fabric.

    Raises:
        InvariantError: transfers wait for each other in a circle, or a promise of the model is broken: a
            packet is lost or out of order, or a buffer is too full.
        FabricError, UsageError: as `simulate`.
    """
    network = wire(traffic, fabric, conditions.rate)
    ports = ports_of(network, fabric)
    transfers = _transfers(traffic, network, conditions.nbytes, settings.packet_nbytes)
    crossings = _crossings(transfers, ports, settings.packet_nbytes)
    check_crossings(crossings, settings.packet_nbytes)
    world = _world(traffic, network, ports, transfers, conditions.rate, settings)
    world.connections["rank"] = np.random.default_rng(seed).permutation(len(world.connections))
    world.chance[0] = np.random.default_rng((seed, 1)).integers(1, 1 << 63)
    rules = settings.rules(conditions.rate)
    result = run(world, rules, _AT_ONCE) if ports.name else DONE
    while result != DONE:
        if result == FULL:
            world = _with_room(world)
        if progress is not None:
            progress(int(world.number[CROSSED]) / crossings)
        result = run(world, rules, _AT_ONCE)
    _check(world, crossings)
    return _outcome(world, ports, settings.buffer_nbytes * ports.ports.astype(np.float64))


def check_crossings(crossings: int, packet_nbytes: int) -> None:
    """Raise UsageError if so many packets over links would take too long."""
    if crossings > MOST_CROSSINGS:
        raise UsageError(
            f"packets of up to {packet_nbytes} bytes would go {crossings} times over a link, which would "
            f"take about {crossings / CROSSINGS_PER_S:.0f} s; up to {MOST_CROSSINGS} are simulated: choose "
            "fewer --bytes, a larger --packet or a smaller fabric, or leave out --packets"
        )


def _transfers(traffic: Traffic, network: Network, nbytes: float, packet_nbytes: int) -> Records:
    transfers = np.zeros(traffic.n_nodes, TRANSFER)
    # Whole bytes, so that sums of what is in a switch are exact, and nothing is left of what has gone.
    transfers["nbytes"] = np.rint(traffic.share * nbytes)
    transfers["arrived"] = np.nan
    waiting = starts(traffic.before, traffic.n_nodes)
    transfers["next_start"], transfers["next_stop"] = waiting[:-1], waiting[1:]
    transfers["connection"] = network.connection
    transfers["priority"] = traffic.priority
    transfers["missing"] = np.bincount(traffic.after, minlength=traffic.n_nodes)
    # More than that are refused, and may not fit into the record.
    transfers["packets"] = np.minimum(_packets(transfers, packet_nbytes), MOST_CROSSINGS + 1)
    return transfers


def _packets(transfers: Records, packet_nbytes: int) -> NDArray[np.float64]:
    return np.maximum(1, np.ceil(transfers["nbytes"] / packet_nbytes))


def _crossings(transfers: Records, ports: Ports, packet_nbytes: int) -> int:
    sends = transfers[transfers["connection"] != NOBODY]
    links = np.diff(ports.path_start)[sends["connection"]]
    return int((_packets(sends, packet_nbytes) * links).sum())


def _world(
    traffic: Traffic, network: Network, ports: Ports, transfers: Records, rate: float, settings: Settings
) -> World:
    """Lay out the records of a simulation, to which nothing has happened."""
    links = _links(ports)
    connections = np.zeros(len(network.sender), CONNECTION)
    connections["path_start"], connections["path_stop"] = ports.path_start[:-1], ports.path_start[1:]
    sends = network.connection >= 0
    connections["queue_start"] = starts(network.connection[sends], len(connections))[:-1]
    connections["sends"] = NOBODY
    out = ports.path[ports.path_start[:-1]]
    connections["rate"] = connections["target"] = links["capacity"][out]
    connections["alpha"] = 1.0
    connections["alpha_falls"] = connections["rate_grows"] = np.inf
    links["first"] = starts(out, len(links))[:-1]
    switches, incoming = _switches(ports, rate, settings)
    number = np.zeros(TOUCHED + 1, np.int64)
    number[[FREE, FIRST, SENDING]] = NOBODY
    world = World(
        np.zeros(0, PACKET),
        transfers,
        connections,
        links,
        switches,
        np.zeros(traffic.n_nodes, ENTRY),
        np.zeros(len(connections), ENTRY),
        traffic.after[np.argsort(traffic.before, kind="stable")],
        ports.path,
        incoming,
        number,
        np.zeros(2),
        np.zeros(1, np.uint64),
    )
    return _with_room(world)


def _links(ports: Ports) -> Records:
    links = np.zeros(len(ports.name), LINK)
    links["capacity"] = ports.capacity
    links["due"] = np.inf
    links["source"], links["target"] = ports.source, ports.target
    links["sends"] = links["head"] = links["tail"] = NOBODY
    links["where"] = links["heap"] = np.arange(len(links))
    return links


def _switches(ports: Ports, rate: float, settings: Settings) -> tuple[Records, Column]:
    """Return the switches, and the links to them: int32. Unused ports add to the buffer as others do."""
    switches = np.zeros(len(ports.switch), SWITCH)
    into = np.flatnonzero(ports.target != NOBODY)
    incoming = into[np.argsort(ports.target[into], kind="stable")].astype(np.int32)
    first = starts(ports.target[into], len(switches))
    switches["in_start"], switches["in_stop"] = first[:-1], first[1:]
    n_unused = ports.ports - np.diff(first)
    switches["shared"] = n_unused * settings.shared_nbytes(rate) if len(switches) else 0.0
    own = [settings.shared_nbytes(capacity) for capacity in ports.capacity[into].tolist()]
    switches["shared"] += np.bincount(ports.target[into], own, minlength=len(switches))
    return switches, incoming


def _with_room(world: World) -> World:
    """Return a world with twice as many packets, the new ones free."""
    old = len(world.packets)
    size = max(2 * old, 8 * (len(world.links) + 8))
    packets = np.zeros(size, PACKET)
    packets[:old] = world.packets
    packets["next"][old:-1] = np.arange(old + 1, size)
    packets["next"][-1] = world.number[FREE]
    world.number[FREE] = old
    world.number[N_FREE] += size - old
    return world._replace(packets=packets)


def _check(world: World, crossings: int) -> None:
    """Raise InvariantError if the step did not end as it must."""
    if np.isnan(world.transfers["arrived"]).any() and len(world.links):
        raise InvariantError("transfers of a schedule wait for each other in a circle, or a packet was lost")
    links, number = world.links, world.number
    left = links["queued"].any() or links["held"].any() or links["paused"].any()
    if number[DISORDERED] or number[CROSSED] != crossings or left:
        raise InvariantError("packets were lost, out of order or left in a switch, or a link stayed paused")


def _outcome(world: World, ports: Ports, buffer_nbytes: NDArray[np.float64]) -> Outcome:
    """Raises InvariantError if a buffer was too full."""
    links, switches, number = world.links, world.switches, world.number
    if (switches["most_held"] > buffer_nbytes).any():
        raise InvariantError("a switch had more bytes than its buffer, though it paused its links")
    return Outcome(
        float(world.clock[1]),
        world.transfers["arrived"],
        ports,
        int(number[RECEIVED]),
        int(number[CROSSED]),
        int(number[EVENTS]),
        int(number[MARKED]),
        int(number[NOTIFIED]),
        links["pauses"].astype(np.int64),
        links["paused_s"],
        links["most_queued"],
        switches["most_held"],
        buffer_nbytes,
    )
