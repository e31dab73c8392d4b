"""How long a step takes on a modelled network: the transfers of its schedule, shared links, delays. Pure.

What is modelled: rates of NICs and links, fair sharing, the order in which a connection sends, a delay for
each hop. What is not: packets, their losses and headers, processors, the barrier at the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bml.errors import InvariantError
from bml.lab.flows.alike import of_bml
from bml.lab.flows.events import LOOKS, SOLUTIONS, TIMES, run
from bml.lab.flows.network import Network, starts, wire
from bml.lab.flows.traffic import Traffic, cut, of_exchange, of_forest, sliced
from bml.lab.flows.world import World, blank
from bml.protocol.step.slices import slice_nbytes as usual_slice_nbytes
from bml.schedule import Exchange, Plan
from bml.topology import BCube

TOLERANCE = 1e-3
"""See `bml.lab.flows.events.run`."""


@dataclass(frozen=True)
class Conditions:
    """What a step is simulated under.

    Attributes:
        nbytes: size of the vector.
        rate: bytes per second of a NIC of rate 1, each way.
        delay_s: from the last byte that is sent to the message that is received, for each hop.
        slice_nbytes: the largest slice; None for that of a job on such NICs.
        tolerance: see `bml.lab.flows.events.run`.
        whole: simulate all servers even if one stands for all.
    """

    nbytes: float
    rate: float
    delay_s: float = 0.0
    slice_nbytes: float | None = None
    tolerance: float = TOLERANCE
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a simulated step did.

    Attributes:
        seconds: from its beginning to the arrival of the last result.
        traffic, network: what was simulated.
        nbytes: float64 [node].
        began, sent, arrived: float64 [node], seconds.
        stands_for: servers for which each simulated one stands.
        n_times: times at which something happened.
        n_solutions: how often rates were shared anew.
        n_looks: links that were looked at for that.
    """

    seconds: float
    traffic: Traffic
    network: Network
    nbytes: NDArray[np.float64]
    began: NDArray[np.float64]
    sent: NDArray[np.float64]
    arrived: NDArray[np.float64]
    stands_for: int
    n_times: int
    n_solutions: int
    n_looks: int

    @property
    def n_transfers(self) -> int:
        """Transfers over one hop that were simulated."""
        return int(np.count_nonzero(self.network.connection >= 0))

    @cached_property
    def carried(self) -> NDArray[np.float64]:
        """Bytes over each link: float64 [link]."""
        network, sends = self.network, self.network.connection >= 0
        by_connection = np.bincount(
            network.connection[sends], self.nbytes[sends], minlength=len(network.part)
        )
        over_path = np.repeat(by_connection, np.diff(network.path_start))
        return np.bincount(network.path, over_path, minlength=len(network.capacity)).astype(np.float64)

    @property
    def utilisation(self) -> NDArray[np.float64]:
        """Bytes over each link as a share of what it can carry in the whole time: float64 [link]."""
        if not self.seconds:
            return np.zeros(len(self.carried))
        return np.asarray(self.carried / (self.network.capacity * self.seconds))

    @property
    def crossing(self) -> NDArray[np.int64]:
        """Connections over each link: int64 [link]."""
        return np.diff(self.network.users_start)


def simulate(plan: Plan, conditions: Conditions) -> Outcome:
    """Simulate one step of a plan.

    Raises:
        FabricError: the plan's algorithm cannot work on its fabric.
        UsageError: the transfers would not fit into memory.
    """
    traffic, stands_for = traffic_of(plan, conditions)
    network = wire(traffic, plan.fabric, conditions.rate, folded=stands_for > 1)
    return play(traffic, network, conditions, stands_for)


def traffic_of(plan: Plan, conditions: Conditions) -> tuple[Traffic, int]:
    """Return what a plan sends, and for how many servers each simulated one stands.

    Raises:
        FabricError, UsageError: as `simulate`.
    """
    fabric = plan.fabric
    longest = conditions.slice_nbytes or usual_slice_nbytes(int(conditions.nbytes), conditions.rate)
    if plan.is_plain_bml:
        assert isinstance(fabric.wiring, BCube)
        shares = cut(conditions.nbytes / plan.pieces, longest)
        whole = conditions.whole or bool(fabric.rates)
        stands_for = 1 if whole else fabric.n_servers
        return sliced(of_bml(fabric.wiring, len(shares), whole), shares), stands_for
    schedule = plan.schedule
    name = f"{plan.algorithm} on {fabric}"
    if isinstance(schedule, Exchange):
        shares = cut(conditions.nbytes, longest)
        return sliced(of_exchange(schedule, name, len(shares)), shares), 1
    heaviest = int(schedule.weight.max()) / schedule.whole
    shares = cut(conditions.nbytes * heaviest, longest)
    return sliced(of_forest(schedule, name, len(shares)), shares), 1


def play(traffic: Traffic, network: Network, conditions: Conditions, stands_for: int = 1) -> Outcome:
    """Let some traffic happen on a network.

    Raises:
        InvariantError: transfers wait for each other in a circle.
    """
    world = _world(traffic, network, conditions.nbytes)
    seconds = 0.0
    if len(network.part):
        seconds = run(world, conditions.delay_s, conditions.tolerance)
    transfers = world.transfers
    if np.isnan(transfers["arrived"]).any():
        raise InvariantError("transfers of a schedule wait for each other in a circle")
    return Outcome(
        float(seconds),
        traffic,
        network,
        transfers["nbytes"],
        transfers["began"],
        transfers["sent"],
        transfers["arrived"],
        stands_for,
        int(world.number[TIMES]),
        int(world.number[SOLUTIONS]),
        int(world.number[LOOKS]),
    )


def _world(traffic: Traffic, network: Network, nbytes: float) -> World:
    """Lay out the records of a simulation."""
    sizes = traffic.n_nodes, len(network.part), len(network.capacity), int(network.part.max(initial=-1)) + 1
    transfers, connections, links, parts = blank(*sizes)
    transfers["connection"] = network.connection
    transfers["nbytes"] = traffic.share * nbytes
    transfers["priority"] = traffic.priority
    transfers["missing"] = np.bincount(traffic.after, minlength=traffic.n_nodes)
    waiting = starts(traffic.before, traffic.n_nodes)
    transfers["next_start"], transfers["next_stop"] = waiting[:-1], waiting[1:]
    connections["part"] = network.part
    connections["path_start"], connections["path_stop"] = network.path_start[:-1], network.path_start[1:]
    sends = network.connection >= 0
    connections["queue_start"] = starts(network.connection[sends], len(connections))[:-1]
    links["capacity"] = network.capacity
    links["users_start"], links["users_stop"] = network.users_start[:-1], network.users_start[1:]
    parts["first"] = starts(network.part, len(parts))[:-1]
    after = traffic.after[np.argsort(traffic.before, kind="stable")]
    return World(
        transfers,
        connections,
        links,
        parts,
        after,
        network.path,
        network.users,
        np.zeros(LOOKS + 1, np.int64),
    )
