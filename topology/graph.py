"""Any fabric: servers and the switches and cables that join them, as a list.

A cable between two servers is a switch with two ports. Switches get levels so that no server has two NICs of
one level: a colouring of the switches, of which those that share a server differ. A server has a NIC for each
of its switches; on levels at which it has none, `group` is -1.

The notation of a graph has all of it, so that it is the same wherever it is read: levels are parted by `;`,
their switches by `,`, the servers of a switch by `-`, and `3*2/5` is server 3 with a NIC of 2/5 of the usual
rate. `graph:0-1-2,3-4-5;0-3,1-4,2-5` is two switches of three servers, and three cables.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import TypeAlias

from bml.topology.errors import UsageError
from bml.topology.fabric import Fabric, Link, Rates
from bml.topology.wiring import Hop, InnerLink, server_of

MOST_SERVERS, MOST_SWITCHES, MOST_LEVELS = 4096, 4096, 64

_MOST_TRIED = 10_000
"""Pairs of switches that share a server, of graphs for whose levels several ways are tried."""

Switch: TypeAlias = tuple[int, ...]
"""The servers of a switch in id order; two are those of a cable."""
Ends: TypeAlias = Sequence[tuple[int, str]]
"""The servers of a switch, each with the rate of its NIC there, "" for the usual one."""

_SERVER = r"[0-9]{1,6}(?:\*[0-9./]{1,64})?"
_NOTATION = re.compile(rf"{_SERVER}(?:[-,;]{_SERVER})*")


@dataclass(frozen=True)
class Graph:
    """The numbering of a graph; see the module's text.

    Attributes:
        sections: for each level its switches, each as its servers in id order.
        said_rates: the rates of NICs that the notation says.
    """

    sections: tuple[tuple[Switch, ...], ...]
    said_rates: Rates = ()

    @cached_property
    def name(self) -> str:
        """Notation, with levels and rates."""
        rates = {link: f"{link[0]}*{rate}" for link, rate in self.said_rates}
        return "graph:" + ";".join(
            ",".join(
                "-".join(rates.get((server, level), str(server)) for server in switch) for switch in section
            )
            for level, section in enumerate(self.sections)
        )

    @cached_property
    def n_servers(self) -> int:
        """Servers are numbered from 0 on."""
        return 1 + max(server for section in self.sections for switch in section for server in switch)

    @property
    def levels(self) -> int:
        """Colours of the switches."""
        return len(self.sections)

    @cached_property
    def ports(self) -> int:
        """Of the largest switch."""
        return max(len(switch) for section in self.sections for switch in section)

    @property
    def is_product(self) -> bool:
        """Nothing is known of a graph."""
        return False

    def n_groups(self, level: int) -> int:
        """Count the switches of a level."""
        return len(self.sections[level])

    def address(self, server: int) -> tuple[int, ...]:
        """The id itself."""
        return (server,)

    def server_at(self, address: tuple[int, ...]) -> int:
        """Server of this id. Raises UsageError if there is none."""
        return server_of(address, self.n_servers, self.name)

    def group(self, server: int, level: int) -> int:
        """Switch of the level at this server, -1 if it has none."""
        return self._groups.get((server, level), -1)

    def members(self, level: int, group: int) -> tuple[int, ...]:
        """The servers of a switch."""
        return self.sections[level][group]

    def route(self, source: int, target: int, turn: int = 0) -> tuple[Hop, ...]:
        """Return a shortest path; at each server `turn` picks one of the ways that are as short."""
        far, hops = self._distances(target), list[Hop]()
        while source != target:
            ways = [hop for hop in self._hops[source] if far[hop[2]] == far[source] - 1]
            hops.append(ways[turn % len(ways)])
            source = hops[-1][2]
        return tuple(hops)

    def inner_path(self, source: int, target: int, flow: int) -> tuple[InnerLink, ...]:
        """Switches are single devices."""
        return ()

    @cached_property
    def _groups(self) -> dict[Link, int]:
        return {
            (server, level): group
            for level, section in enumerate(self.sections)
            for group, switch in enumerate(section)
            for server in switch
        }

    @cached_property
    def _hops(self) -> list[list[Hop]]:
        hops: list[list[Hop]] = [[] for _ in range(self.n_servers)]
        for level, section in enumerate(self.sections):
            for switch in section:
                for server in switch:
                    hops[server] += [(server, level, other) for other in switch if other != server]
        return hops

    @cached_property
    def _known(self) -> dict[int, list[int]]:
        return {}

    def _distances(self, target: int) -> list[int]:
        """Hops from each server to this one."""
        if target not in self._known:
            far = [-1] * self.n_servers
            far[target] = 0
            ahead = deque([target])
            while ahead:
                at = ahead.popleft()
                for _, _, other in self._hops[at]:
                    if far[other] < 0:
                        far[other] = far[at] + 1
                        ahead.append(other)
            self._known[target] = far
        return self._known[target]


def is_notation(text: str) -> bool:
    """Whether this, after `graph:`, is a graph itself, and not the name of a file."""
    return _NOTATION.fullmatch(text) is not None


def graph(text: str) -> Fabric:
    """Build a graph from its notation without `graph:`, such as `0-1-2,3-4-5;0-3,1-4,2-5`.

    Where no level is given but needed, as in `0-1,1-2,2-0`, switches get levels.

    Raises:
        UsageError: the text is no graph that can be built; the message says why.
    """
    if not is_notation(text):
        raise UsageError(
            f"'{text:.60}' is no graph: write the servers of each switch or cable, such as 0-1-2,2-3,3-0, "
            "or give a file"
        )
    sections = [[_ends(switch) for switch in section.split(",")] for section in text.split(";")]
    if len(sections) > 1:
        return _built([list(map(_checked, section)) for section in sections])
    return of_switches(sections[0])


def of_switches(switches: Iterable[Ends]) -> Fabric:
    """Build a graph of these switches and cables; each server of one may have a rate, in units of B.

    Raises:
        UsageError: servers are not numbered from 0 on, or fall apart; a switch joins fewer than two, or one
            twice; a rate is no positive number; the graph is too large.
    """
    checked = [_checked(switch) for switch in switches]
    if not checked:
        raise UsageError("a graph needs servers, and switches or cables that join them")
    _check_size(checked)
    n_nics = Counter(server for switch in checked for server, _ in switch)
    server, most = n_nics.most_common(1)[0]
    if most > MOST_LEVELS:
        raise UsageError(f"server {server} has {most} NICs, {MOST_LEVELS} are the most")
    colours = _colours([[server for server, _ in switch] for switch in checked])
    sections: list[list[Ends]] = [[] for _ in range(1 + max(colours))]
    for switch, level in zip(checked, colours, strict=True):
        sections[level].append(switch)
    return _built(sections)


def _ends(text: str) -> Ends:
    parted = (each.partition("*") for each in text.split("-"))
    return [(int(server), rate) for server, _, rate in parted]


def _checked(switch: Ends) -> Ends:
    servers = [server for server, _ in switch]
    twice = [server for server, times in Counter(servers).items() if times > 1]
    if twice:
        raise UsageError(f"server {twice[0]} is on one switch twice: its NICs need switches of their own")
    if len(servers) < 2:
        raise UsageError(f"a switch joins server {servers[0]} alone: it needs two servers at least")
    return sorted(switch)


def _check_size(switches: Sequence[Ends]) -> None:
    n_servers = 1 + max(server for switch in switches for server, _ in switch)
    n_switches = len(switches)
    if n_switches > MOST_SWITCHES or n_servers > MOST_SERVERS:
        raise UsageError(
            f"a graph of {n_servers} servers and {n_switches} switches and cables is too large: "
            f"{MOST_SERVERS} and {MOST_SWITCHES} are the most"
        )


def _colours(switches: Sequence[Sequence[int]]) -> list[int]:
    """The level of each switch; those that share a server differ."""
    import networkx as nx  # here, as it takes half a second, and the notation of a graph says the levels

    at: dict[int, list[int]] = {}
    for number, servers in enumerate(switches):
        for server in servers:
            at.setdefault(server, []).append(number)
    shared = nx.Graph()
    shared.add_nodes_from(range(len(switches)))
    for numbers in at.values():
        shared.add_edges_from(combinations(numbers, 2))
    # The others find fewer levels now and then, and take a minute on a large graph.
    more = ("saturation_largest_first", "smallest_last") if shared.number_of_edges() < _MOST_TRIED else ()
    tries = [nx.greedy_color(shared, strategy) for strategy in ("largest_first", *more)]
    best = min(tries, key=lambda colour: max(colour.values()))
    names: dict[int, int] = {}
    return [names.setdefault(best[number], len(names)) for number in range(len(switches))]


def _built(sections: Sequence[Sequence[Ends]]) -> Fabric:
    _check_size([switch for section in sections for switch in section])
    if len(sections) > MOST_LEVELS:
        raise UsageError(f"a graph of {len(sections)} levels is too large: {MOST_LEVELS} are the most")
    for level, section in enumerate(sections):
        counted = Counter(server for switch in section for server, _ in switch)
        twice = [server for server, times in counted.items() if times > 1]
        if twice:
            raise UsageError(f"server {min(twice)} is on two switches of level {level}: it has one NIC there")
    made = tuple(tuple(tuple(server for server, _ in switch) for switch in section) for section in sections)
    there = {server for section in made for switch in section for server in switch}
    missing = set(range(1 + max(there))) - there
    if missing:
        raise UsageError(
            f"servers are numbered from 0 on, and {max(there)} is the last: server {min(missing)} is missing"
        )
    rates: dict[Link, int | str | Fraction] = {
        (server, level): rate
        for level, section in enumerate(sections)
        for switch in section
        for server, rate in switch
        if rate
    }
    said = Fabric(Graph(made)).with_rates(rates).rates
    fabric = Fabric(Graph(made, said), rates=said)
    if not fabric.is_connected:
        parts = fabric.components()
        raise UsageError(
            f"the graph falls apart: servers {list(parts[0])[:8]} do not reach servers {list(parts[1])[:8]}"
        )
    return fabric
