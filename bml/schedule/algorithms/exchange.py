"""Exchange: whole vectors go round the groups, level after level: k rounds, no second phase.

In round l every server sends what it has summed so far to the other members of its level-l group and adds
what they send, in the order of their ids. All members of a group add the same terms in the same order, so
after every round they hold the same bits, and after the last round everybody does. It is no forest: every
server is the root of a tree of its own, and all trees share their hops.

A NIC carries (n-1)·P instead of 2(N-1)/(kN)·P, so this pays where start-up times rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from bml.schedule.ir.cost import Load, slowest
from bml.schedule.ir.program import Hop
from bml.topology import BCube, Fabric, FabricError, Torus

Rounds: TypeAlias = tuple[tuple[Hop, ...], ...]
"""Per round, the servers with which one server exchanges, in id order."""


@dataclass(frozen=True)
class ExchangeProgram:
    """What one server does: in every round it sends to, and adds from, the same servers.

    Attributes:
        server: its id.
        rounds: partners of each round; no round is without any.
    """

    server: int
    rounds: Rounds


@dataclass(frozen=True)
class Exchange:
    """The exchange of all live servers of a fabric.

    Attributes:
        fabric: what it is for.
        rounds: live server -> its rounds, the same number for everybody, some perhaps without partners.
    """

    fabric: Fabric
    rounds: dict[int, Rounds]

    @property
    def n_rounds(self) -> int:
        """Number of rounds."""
        return len(next(iter(self.rounds.values())))

    def program(self, server: int) -> ExchangeProgram:
        """Part of one server."""
        return ExchangeProgram(server, tuple(partners for partners in self.rounds[server] if partners))

    @cached_property
    def load(self) -> Load:
        """Bytes of every NIC, all rounds together."""
        return self._load(range(self.n_rounds))

    def gst(self) -> Fraction:
        """Time of the busiest NIC in T, with rounds of different slices at work at once."""
        return self._time(self.load)

    def gst_staged(self) -> Fraction:
        """Time in T with a barrier after every round."""
        return sum((self._time(self._load(range(i, i + 1))) for i in range(self.n_rounds)), Fraction(0))

    def _load(self, rounds: range) -> Load:
        shape = (self.fabric.n_servers, self.fabric.levels)
        sent, received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for server, own in self.rounds.items():
            for hop in (hop for i in rounds for hop in own[i]):
                sent[server, hop.level] += 1
                received[hop.peer, hop.level] += 1
        return Load(sent, received, 1)

    def _time(self, counts: Load) -> Fraction:
        return slowest(np.maximum(counts.sent, counts.received), self.fabric)


def exchange(fabric: Fabric) -> Exchange:
    """Build the exchange over the levels of BCube, the dimensions of a small torus, or one switch.

    On a damaged fabric it works if what is left of the groups still is a product, for example when a whole
    group is dead.

    Raises:
        FabricError: it cannot work here; the message says which group and why.
    """
    made = Exchange(fabric, {server: _rounds(fabric, server) for server in fabric.servers})
    problems = verify_exchange(made, fabric) if fabric.failures else []
    if problems:
        raise FabricError(
            f"exchange cannot work on {fabric}: {problems[0]}. Its rounds need whole groups; "
            "ask for packed or detour instead"
        )
    return made


def works_on(fabric: Fabric) -> bool:
    """Whether the exchange works on a fabric; of most damage this is seen at once."""
    own = _groups(fabric, fabric.servers[0])
    alive = prod(1 + sum(fabric.server_alive(other) for other in group) for group in own)
    if alive != len(fabric.servers):
        return False  # sizes of the groups of a product multiply to all
    try:
        exchange(fabric) if fabric.failures else one_server(fabric, fabric.servers[0])
    except FabricError:
        return False
    return True


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


def verify_exchange(made: Exchange, fabric: Fabric) -> list[str]:
    """Return what is wrong with an exchange on a fabric, in words; empty when sound.

    Sound means: partners are live neighbours and name each other in the same round; in every round the
    partners of a group agree on who is in it, so that they add the same terms; in the end every live
    server's sum holds every live server's vector exactly once.
    """
    if set(made.rounds) != set(fabric.servers):
        return [f"it is for servers {sorted(made.rounds)}, alive are {list(fabric.servers)}"]
    problems = [
        f"servers {server} and {hop.peer} are no live neighbours on level {hop.level}"
        for server, own in made.rounds.items()
        for hops in own
        for hop in hops
        if not fabric.nic_alive(server, hop.level) or hop.peer not in fabric.neighbours(server, hop.level)
    ]
    return problems or _count_contributions(made)


def _count_contributions(made: Exchange) -> list[str]:
    """Follow how often every server's vector is in every server's sum, round by round."""
    servers = sorted(made.rounds)
    held = {server: {server: 1} for server in servers}
    for number in range(made.n_rounds):
        after: dict[int, dict[int, int]] = {}
        for server in servers:
            group = sorted([server, *(hop.peer for hop in made.rounds[server][number])])
            for other in group:
                theirs = sorted([other, *(hop.peer for hop in made.rounds[other][number])])
                if theirs != group:
                    return [f"servers {server} and {other} do not agree on their group in round {number}"]
            total: dict[int, int] = {}
            for other in group:
                for origin, count in held[other].items():
                    total[origin] = total.get(origin, 0) + count
            after[server] = total
        held = after
    return [
        problem for server in servers for problem in _contribution_problems(server, held[server], servers)
    ]


def _contribution_problems(server: int, held: dict[int, int], servers: list[int]) -> list[str]:
    missing = [other for other in servers if other not in held]
    twice = [other for other, count in held.items() if count > 1]
    problems = [f"server {server} never gets the contribution of server {missing[0]}"] if missing else []
    return problems + ([f"server {server} adds server {twice[0]} more than once"] if twice else [])
