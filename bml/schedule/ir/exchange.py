"""The other form of a schedule, for small vectors: rounds in which servers exchange whole vectors.

In every round a server sends what it has summed so far to its partners and adds what they send. There is no
second phase. A forest cannot say that: every server is the root of a tree of its own, and all trees share
their hops.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np

from bml.schedule.ir.cost import Load, slowest
from bml.schedule.ir.program import Hop
from bml.topology import Fabric

Rounds: TypeAlias = tuple[tuple[Hop, ...], ...]
"""Per round, the servers with which one server exchanges, in id order."""


@dataclass(frozen=True)
class ExchangeProgram:
    """The program of one server: in every round it sends to, and adds from, the same servers.

    Attributes:
        server: its id.
        rounds: partners of each round; no round is without any.
    """

    server: int
    rounds: Rounds

    @property
    def frames(self) -> int:
        """Frames of a short vector that this server sends and receives."""
        return 2 * sum(len(partners) for partners in self.rounds)


@dataclass(frozen=True)
class Exchange:
    """The exchange of all live servers of a fabric.

    Attributes:
        fabric: what it is for.
        rounds: live server -> its rounds, the same number for all servers, some perhaps without partners.
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


def verify_exchange(made: Exchange, fabric: Fabric) -> list[str]:
    """Return what is wrong with an exchange on a fabric, in words; empty when sound.

    Sound means: partners are live neighbours and name each other in the same round; in every round the
    partners of a group agree on its members, so that they add the same terms; in the end every live
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
    """Follow how often every server's vector is in every server's sum, round by round.

    Servers that have added the same sums hold the same sum: it is counted once for all of them.
    """
    servers = sorted(made.rounds)
    sums = [{server: 1} for server in servers]
    """How often each vector is in the sums, by the number of a sum."""
    held = {server: number for number, server in enumerate(servers)}
    """The number of each server's sum."""
    for at in range(made.n_rounds):
        groups = {server: _group(made, server, at) for server in servers}
        totals: list[dict[int, int]] = []
        numbers: dict[tuple[int, ...], int] = {}
        after: dict[int, int] = {}
        for group in dict.fromkeys(groups.values()):
            stray = next((other for other in group if groups[other] != group), None)
            if stray is not None:
                return [f"servers {group[0]} and {stray} do not agree on their group in round {at}"]
            terms = tuple(sorted(held[other] for other in group))
            if terms not in numbers:
                numbers[terms] = len(totals)
                totals.append(_added([sums[term] for term in terms]))
            after.update(dict.fromkeys(group, numbers[terms]))
        held, sums = after, totals
    wrong = [_wrong_counts(total, servers) for total in sums]
    return [f"server {server} {each}" for server in servers for each in wrong[held[server]]]


def _group(made: Exchange, server: int, at: int) -> tuple[int, ...]:
    """The server and its partners in a round, in id order."""
    return tuple(sorted([server, *(hop.peer for hop in made.rounds[server][at])]))


def _added(terms: list[dict[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for term in terms:
        for origin, count in term.items():
            total[origin] = total.get(origin, 0) + count
    return total


def _wrong_counts(total: dict[int, int], servers: list[int]) -> list[str]:
    missing = next((other for other in servers if other not in total), None)
    twice = next((other for other, count in total.items() if count > 1), None)
    problems = [] if missing is None else [f"never gets the contribution of server {missing}"]
    return problems + ([] if twice is None else [f"adds server {twice} more than once"])
