"""Exchange: whole vectors go round the groups, level after level: k rounds, no second phase.

In round l every server sends what it has summed so far to the other members of its level-l group and adds
what they send, in the order of their ids. All members of a group add the same terms in the same order, so
after every round they hold the same bits, and after the last round all servers do. It is no forest: every
server is the root of a tree of its own, and all trees share their hops.

A NIC carries (n-1)·P instead of 2(N-1)/(kN)·P, so this pays where start-up times rule.
"""

from __future__ import annotations

from math import prod

from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.exchange import Exchange, Rounds, verify_exchange
from bml.schedule.ir.program import Hop
from bml.topology import BCube, Fabric, FabricError, Torus

_MOST_HOPS = 1 << 22
"""Hops of all servers that are built: each is an object of its own."""


@algorithm(
    "exchange",
    does="whole vectors, k rounds, for small sizes",
    damaged="works if whole groups are dead, else an error that says which hop or contribution is missing",
)
def exchange(fabric: Fabric) -> Exchange:
    """Build the exchange over the levels of BCube, the dimensions of a small torus, or one switch.

    On a damaged fabric it works if what is left of the groups still is a product, for example when a whole
    group is dead.

    Raises:
        FabricError: it cannot work here; the message says which group and why, or that there are too many
            hops to be built.
    """
    hops = len(fabric.servers) * sum(map(len, _groups(fabric, fabric.servers[0])))
    if hops > _MOST_HOPS:
        raise FabricError(
            f"the exchange of {fabric} has {hops} hops, up to {_MOST_HOPS} are built: plan a smaller fabric "
            "of this kind, or choose another algorithm"
        )
    made = Exchange(fabric, {server: _rounds(fabric, server) for server in fabric.servers})
    problems = verify_exchange(made, fabric) if fabric.failures else []
    if problems:
        raise FabricError(
            f"exchange cannot work on {fabric}: {problems[0]}. Its rounds need whole groups; "
            "ask for packed or detour instead"
        )
    return made


def part_of(fabric: Fabric, server: int) -> Exchange:
    """Return the part of one server; no server has less to do. Other parts may turn out not to work.

    Raises:
        FabricError: it is seen at once that an exchange cannot work here.
    """
    own = _groups(fabric, server)
    alive = prod(1 + sum(fabric.server_alive(other) for other in group) for group in own)
    if alive != len(fabric.servers):  # sizes of the groups of a product multiply to all
        raise FabricError(f"exchange cannot work on {fabric}: its rounds need whole groups")
    return Exchange(fabric, {server: _rounds(fabric, server)})


def one_server(fabric: Fabric, server: int) -> Exchange:
    """Return the part of one server in the exchange of a healthy fabric, where all parts are alike.

    Raises:
        FabricError: exchange cannot work on this family, or the fabric is damaged.
    """
    if fabric.failures:
        raise FabricError(f"{fabric} is damaged: the parts of its servers differ, build all with `exchange`")
    return Exchange(fabric, {server: _rounds(fabric, server)})


def _rounds(fabric: Fabric, server: int) -> Rounds:
    """Partners of one server: in round l all live servers whose address differs in digit l only."""
    groups = _groups(fabric, server)
    return tuple(
        tuple(_partner(fabric, server, other) for other in group if fabric.server_alive(other))
        for group in groups
    )


def _groups(fabric: Fabric, server: int) -> list[list[int]]:
    """Other members of the server's group in every dimension, dead ones too, in id order."""
    match fabric.wiring:
        case BCube(size, dimensions) | Torus(size, dimensions):
            lows = [size**dimension for dimension in range(dimensions)]
            bases = [server - server // low % size * low for low in lows]
            return [
                [base + x * low for x in range(size) if base + x * low != server]
                for low, base in zip(lows, bases, strict=True)
            ]
    return [[other for other in range(fabric.n_servers) if other != server]]


def _partner(fabric: Fabric, server: int, other: int) -> Hop:
    """The direct hop to a member of the group. Raises FabricError if there is none alive."""
    route = fabric.route(server, other)
    level = route[0][1]
    if len(route) == 1 and other in fabric.neighbours(server, level):
        return Hop(other, other, level)
    if len(route) > 1:
        raise FabricError(
            f"exchange cannot work on {fabric}: servers {server} and {other} of one ring are no neighbours, "
            "and a ring of more than 3 has such pairs; ask for hips or packed instead"
        )
    raise FabricError(
        f"exchange cannot work on {fabric}: servers {server} and {other} must exchange over level {level}, "
        "where no live link joins them; ask for packed or detour instead"
    )
