"""Puts servers that exchange much behind one switch, where the racks of the machines are known. Pure.

A *link* here is a pair of servers that share a switch of the fabric: those that send to each other. Bytes
between machines of different racks pass the switches above the racks, which are often oversubscribed. So as
few links as possible are to cross racks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bml.cluster.fleets.placement import Machine, usable
from bml.errors import UsageError
from bml.topology import Fabric

_FORM = "write a rack and its machines on each line, like 'rack-1: [10.10.0.1, 10.10.0.2]'"
#: How many orders of the racks are tried, and how many of the levels of the fabric.
_ORDERS = 24
#: How many of the best beginnings are improved.
_IMPROVED = 4

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Racks:
    """The rack of each machine, by its address or its host name."""

    of: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, content: str) -> Racks:
        """Read a topology file, YAML or JSON. Raises UsageError."""
        import yaml  # here, as no server reads files

        try:
            document = yaml.safe_load(content)
        except (yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"the topology file is neither YAML nor JSON: {error}") from error
        return cls.parse(document)

    @classmethod
    def parse(cls, document: Any) -> Racks:
        """Take a mapping of racks to the machines in them. Raises UsageError."""
        if not isinstance(document, Mapping) or not document:
            raise UsageError(f"a topology has racks, and this is {document!r:.80}: {_FORM}")
        of: dict[str, str] = {}
        for rack, machines in document.items():
            if not isinstance(machines, list) or not machines or not all(_is_name(each) for each in machines):
                raise UsageError(f"the machines of rack {rack!r} are {machines!r:.80}: {_FORM}")
            for machine in machines:
                if machine in of:
                    raise UsageError(f"the machine {machine} is in rack {of[machine]!r} and in {rack!r}")
                of[machine] = str(rack)
        return cls(of)

    def __bool__(self) -> bool:
        return bool(self.of)

    def rack(self, machine: Machine) -> str:
        """Return the rack of a machine; one that is in none has a rack of its own."""
        return self.of.get(machine.address) or self.of.get(machine.host) or f"the rack of {machine.address}"

    def homes(self, fabric: Fabric, machines: Sequence[Machine]) -> dict[int, str]:
        """Return the node of every server, see `in_racks`. Raises UsageError if a machine is in no rack."""
        self.check(usable(machines))
        return in_racks(fabric, fabric.servers, machines, self)

    def check(self, machines: Sequence[Machine]) -> None:
        """Raise UsageError unless all these machines are in a rack."""
        strangers = [each for each in machines if not {each.address, each.host} & self.of.keys()]
        if strangers:
            named = ", ".join(f"{each.address} ({each.host or 'no host name'})" for each in strangers)
            raise UsageError(
                f"these machines of the cluster are in no rack of the topology: {named}; it names "
                f"{', '.join(self.of)}"
            )


def in_racks(
    fabric: Fabric, servers: Sequence[int], machines: Sequence[Machine], racks: Racks
) -> dict[int, str]:
    """Return the node of every server: as many on each machine, give or take one; few links cross racks.

    Of several ways with as few links between racks, one with few links between machines.
    """
    ordered = sorted(usable(machines), key=lambda each: (racks.rack(each), each))[: len(servers)]
    links = _links(fabric, servers)
    begun: list[tuple[int, Ints, list[Machine]]] = []
    for order in islice(permutations(sorted({racks.rack(each) for each in ordered})), _ORDERS):
        row = sorted(ordered, key=lambda each: (order.index(racks.rack(each)), each))
        at = np.array([order.index(racks.rack(each)) for each in row])
        filled = np.repeat(at, _sizes(len(servers), len(row)))
        for turn in _orders(fabric, servers):
            parts = np.empty(len(servers), np.int64)
            parts[turn] = filled
            begun.append((_crossing(links, parts), parts, row))
    begun.sort(key=lambda each: each[0])
    found = [(_improved(links, parts), row) for _, parts, row in begun[:_IMPROVED]]
    parts, row = min(found, key=lambda each: _crossing(links, each[0]))
    return _onto_machines(servers, links, parts, row, racks)


def crossing(
    fabric: Fabric, homes: Mapping[int, str], machines: Sequence[Machine], racks: Racks
) -> tuple[int, int]:
    """Return how many links cross racks, and how many there are."""
    rack = {each.node: racks.rack(each) for each in machines}
    servers = sorted(homes)
    links = _links(fabric, servers)
    names = sorted(set(rack.values()))
    parts = np.array([names.index(rack[homes[server]]) for server in servers])
    return _crossing(links, parts), int(links.sum()) // 2


def _onto_machines(
    servers: Sequence[int], links: Ints, parts: Ints, row: Sequence[Machine], racks: Racks
) -> dict[int, str]:
    """Put the servers of each part on the machines of its rack."""
    homes: dict[int, str] = {}
    names = list(dict.fromkeys(racks.rack(each) for each in row))
    sizes = dict(zip((each.node for each in row), _sizes(len(servers), len(row)), strict=True))
    for part, name in enumerate(names):
        here = np.flatnonzero(parts == part)
        there = [each for each in row if racks.rack(each) == name]
        filled = np.repeat(np.arange(len(there)), [sizes[each.node] for each in there])
        on = _improved(links[np.ix_(here, here)], filled)
        homes |= {servers[int(i)]: there[int(at)].node for i, at in zip(here, on, strict=True)}
    return homes


def _orders(fabric: Fabric, servers: Sequence[int]) -> Iterator[list[int]]:
    """Yield orders of the servers in which neighbours of some levels are together: by their digits."""
    digits = [fabric.address(server) for server in servers]
    for levels in islice(permutations(range(len(digits[0]))), _ORDERS):
        yield sorted(range(len(servers)), key=lambda at: [digits[at][level] for level in levels])


def _improved(links: Ints, parts: Ints) -> Ints:
    """Swap servers of different parts as long as fewer links cross then: Kernighan and Lin, 1970.

    Every round swaps the best pair of servers that were not swapped in it, also where that is a loss, and
    keeps the swaps up to the best moment. It ends when a round brings nothing.
    """
    best = parts.copy()
    while True:
        now, free, gained, moments = best.copy(), np.ones(len(best), bool), 0, [(0, best)]
        while (pair := _best_swap(links, now, free)) is not None:
            gain, one, other = pair
            now[one], now[other] = now[other], now[one]
            free[[one, other]] = False
            gained += gain
            moments.append((gained, now.copy()))
        most, found = max(moments, key=lambda each: each[0])
        if most == 0:
            return best
        best = found


def _best_swap(links: Ints, parts: Ints, free: NDArray[np.bool_]) -> tuple[int, int, int] | None:
    """Return how many links fewer cross after the best swap, and its two servers."""
    towards = links @ np.eye(int(parts.max()) + 1, dtype=np.int64)[parts]  # of each server, into each part
    there = towards[:, parts]  # [i, j]: links of i into the part of j
    own = np.diagonal(there)
    gains = there - own[:, None] + there.T - own[None, :] - 2 * links
    allowed = free[:, None] & free[None, :] & (parts[:, None] != parts[None, :])
    if not allowed.any():
        return None
    gains = np.where(allowed, gains, np.iinfo(np.int64).min)
    one, other = divmod(int(gains.argmax()), len(parts))
    return int(gains[one, other]), one, other


def _links(fabric: Fabric, servers: Sequence[int]) -> Ints:
    """Return which servers exchange data directly, as a symmetric matrix: 1 for each switch between two."""
    at = {server: i for i, server in enumerate(servers)}
    links = np.zeros((len(servers), len(servers)), np.int64)
    for server in servers:
        for level in range(fabric.levels):
            for other in fabric.neighbours(server, level):
                if other in at:
                    links[at[server], at[other]] += 1
    return links


def _crossing(links: Ints, parts: Ints) -> int:
    return int(links[parts[:, None] != parts[None, :]].sum()) // 2


def _sizes(servers: int, machines: int) -> list[int]:
    """Return how many servers each machine gets."""
    return [(i + 1) * servers // machines - i * servers // machines for i in range(machines)]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)
