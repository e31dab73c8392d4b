"""A fabric: a wiring that never changes, the rates of its links, what is known dead. An immutable value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bml.topology.errors import UsageError
from bml.topology.failure import Failure, LinkFailure, ServerFailure, SwitchFailure, parse_failure
from bml.topology.wiring import Hop, InnerLink, Wiring

if TYPE_CHECKING:
    import networkx as nx

Link: TypeAlias = tuple[int, int]
"""(server, level)."""
Switch: TypeAlias = tuple[int, int]
"""(level, group)."""
Rates: TypeAlias = tuple[tuple[Link, Fraction], ...]
"""The links whose rate is not 1, in order, with their rate in units of B."""

NORMAL = Fraction(1)
_KEPT = 4
"""Damaged fabrics that a fabric keeps: each has tables of its own, and servers ask for few."""
_MOST_OF_RATE = 10**30
#: Read by Fraction only if it is short: 1e99999999 has as many digits.
_RATE = re.compile(r"[-+0-9._/ ]{1,64}(e[-+]?[0-9]{1,2})?", re.IGNORECASE)
"""Rate of a link of which nothing else was said: B, per direction."""


@dataclass(frozen=True)
class Fabric:
    """A wiring, what is known dead in it and the rates of its links. Immutable and hashable.

    `without` gives another one with more dead, `with_rates` one with other rates. Two fabrics are equal
    when wiring, failures and rates are; a failure that another one implies (a link of a dead server) is
    still kept as it was reported.
    """

    wiring: Wiring
    failures: frozenset[Failure] = frozenset()
    rates: Rates = ()

    @property
    def name(self) -> str:
        """Notation of the undamaged fabric, such as `bcube:3x2`."""
        return self.wiring.name

    @property
    def n_servers(self) -> int:
        """Number of servers when nothing is broken; ids are 0 .. n_servers - 1."""
        return self.wiring.n_servers

    @property
    def levels(self) -> int:
        """NICs of a server (k)."""
        return self.wiring.levels

    @property
    def ports(self) -> int:
        """Ports of a switch (n)."""
        return self.wiring.ports

    def __str__(self) -> str:
        dead = ", ".join(str(failure) for failure in sorted(self.failures))
        name = f"{self.name} with {len(self.rates)} link(s) of other rates" if self.rates else self.name
        return f"{name} without {dead}" if dead else name

    def __reduce__(self) -> tuple[type[Fabric], tuple[Wiring, frozenset[Failure], Rates]]:
        # Tables and graph are derived: the other side makes its own, they are not worth sending.
        return Fabric, (self.wiring, self.failures, self.rates)

    # What is wired, whether or not it is alive.

    def address(self, server: int) -> tuple[int, ...]:
        """Digits of a server, a_0 first; id = sum of a_i n^i. Raises UsageError if there is none."""
        self._check_server(server)
        return self.wiring.address(server)

    def server_at(self, address: tuple[int, ...]) -> int:
        """Id of the server with these digits, a_0 first. Raises UsageError if there is none."""
        return self.wiring.server_at(address)

    def group(self, server: int, level: int) -> int:
        """Number of the level's switch to which the server is cabled; -1 if it has no NIC of that level."""
        return self.wiring.group(server, level)

    def members(self, level: int, group: int) -> tuple[int, ...]:
        """All servers cabled to a switch, dead ones too, in id order."""
        return self.wiring.members(level, group)

    @cached_property
    def groups(self) -> NDArray[np.int32]:
        """`group(server, level)` of everything: int32 [server, level], read-only."""
        return _groups(self.wiring)

    def route(self, source: int, target: int, turn: int = 0) -> tuple[Hop, ...]:
        """Return a shortest path if nothing were broken: hops (from server, level, to server).

        Where several are alike, `turn` picks one. Empty from a server to itself.
        """
        return self.wiring.route(source, target, turn)

    def inner_path(self, source: int, target: int, flow: int = 0) -> tuple[InnerLink, ...]:
        """Links between inner switches that a flow takes from one server to another on their switch.

        Empty unless the servers see a network of switches as one (Fat-Tree).
        """
        return self.wiring.inner_path(source, target, flow)

    # What is alive.

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """Live servers in id order."""
        dead = {failure.server for failure in self.failures if isinstance(failure, ServerFailure)}
        return tuple(server for server in range(self.n_servers) if server not in dead)

    @cached_property
    def nics(self) -> NDArray[np.bool_]:
        """`nic_alive(server, level)` of everything: bool [server, level], read-only."""
        alive = self.groups >= 0
        for failure in self.failures:
            match failure:
                case ServerFailure(server):
                    alive[server] = False
                case LinkFailure(server, level):
                    alive[server, level] = False
                case SwitchFailure(level, group):
                    alive[list(self.members(level, group)), level] = False
        alive.setflags(write=False)
        return alive

    @cached_property
    def switches(self) -> tuple[Switch, ...]:
        """Live switches as (level, group), in order."""
        return tuple(
            (level, group)
            for level in range(self.levels)
            for group in range(self.wiring.n_groups(level))
            if self.switch_alive(level, group)
        )

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Live links as (server, level): live server, live NIC, live switch."""
        return tuple((int(server), int(level)) for server, level in np.argwhere(self.nics))

    def server_alive(self, server: int) -> bool:
        """Whether the server exists and is not known dead."""
        return 0 <= server < self.n_servers and ServerFailure(server) not in self.failures

    def nic_alive(self, server: int, level: int) -> bool:
        """Whether the NIC can reach its switch: live server, live link, live switch."""
        return bool(self.nics[server, level])

    def switch_alive(self, level: int, group: int) -> bool:
        """Whether the switch itself is not known dead."""
        return SwitchFailure(level, group) not in self.failures

    def attached(self, level: int, group: int) -> tuple[int, ...]:
        """Live servers that reach this switch over a live NIC, in id order."""
        return self._attached[level, group]

    def neighbours(self, server: int, level: int) -> tuple[int, ...]:
        """Live servers one hop away over the NIC (server, level), in id order; none if that NIC is dead."""
        if not self.nic_alive(server, level):
            return ()
        return tuple(other for other in self.attached(level, self.group(server, level)) if other != server)

    def components(self) -> tuple[tuple[int, ...], ...]:
        """Parts into which the live servers fall, each in id order: largest first, ties by lowest id."""
        parts: dict[int, list[int]] = {}
        for server, lowest in zip(
            self.servers, self._lowest_reached[list(self.servers)].tolist(), strict=True
        ):
            parts.setdefault(lowest, []).append(server)
        return tuple(sorted(map(tuple, parts.values()), key=lambda part: (-len(part), part)))

    @cached_property
    def is_connected(self) -> bool:
        """Whether at least one server is alive and all live ones reach one another."""
        return len(np.unique(self._lowest_reached[list(self.servers)])) == 1

    @cached_property
    def _lowest_reached(self) -> NDArray[np.int64]:
        """Of each live server, the lowest id among those that it reaches, its own included."""
        cabled = self.nics
        # Every server passes on the lowest id that it has heard of, until no server hears of a lower one.
        lowest = np.arange(self.n_servers)
        changed = True
        while changed:
            before = lowest.copy()
            for level in range(self.levels):
                here = np.flatnonzero(cabled[:, level])
                group = self.groups[here, level]
                heard = np.full(self.wiring.n_groups(level), self.n_servers)
                np.minimum.at(heard, group, lowest[here])
                lowest[here] = heard[group]
            changed = not np.array_equal(lowest, before)
        return lowest

    def graph(self) -> nx.Graph:
        """Live servers (nodes: int) and live switches (nodes: (level, group)), joined by live links.

        The graph is cached and frozen; copy it to change it.
        """
        return self._graph

    def without(self, *failures: Failure | str) -> Fabric:
        """Return this fabric with more parts dead.

        Raises:
            UsageError: a text is no failure, or the fabric has no such part.
        """
        parsed = frozenset(parse_failure(item) if isinstance(item, str) else item for item in failures)
        known = self._damaged.get(parsed)
        if known is not None:
            return known
        for failure in parsed:
            self._check(failure)
        if len(self._damaged) >= _KEPT:  # threads may have added one meanwhile
            self._damaged.clear()
        return self._damaged.setdefault(parsed, Fabric(self.wiring, self.failures | parsed, self.rates))

    # How fast it is.

    def rate(self, server: int, level: int) -> Fraction:
        """Rate of the link (server, level) in each direction, exact, in units of B; 1 unless it was set."""
        return self._rates.get((server, level), NORMAL)

    def with_rates(self, rates: Mapping[Link, int | str | Fraction]) -> Fabric:
        """Return this fabric with other rates of some links: `fabric.with_rates({(4, 0): "1/10"})`.

        Rates are exact, in units of B and the same in both directions: an int, a Fraction, or a text such
        as "0.4" or "2/5". They hold whether or not the link is alive now.

        Raises:
            UsageError: the fabric has no such link, or the rate is no positive number (a link that carries
                nothing is a failure: `without`).
        """
        merged = dict(self.rates)
        for (server, level), given in rates.items():
            self._check(LinkFailure(server, level))
            merged[server, level] = _exact_rate(given, f"{server}/{level}")
        changed = sorted((link, rate) for link, rate in merged.items() if rate != NORMAL)
        return Fabric(self.wiring, self.failures, tuple(changed))

    @cached_property
    def _damaged(self) -> dict[frozenset[Failure], Fabric]:
        """The last fabrics that `without` has returned: servers ask for that of a view again and again."""
        return {}

    @cached_property
    def _rates(self) -> dict[Link, Fraction]:
        return dict(self.rates)

    @cached_property
    def _attached(self) -> dict[Switch, tuple[int, ...]]:
        nics = self.nics.tolist()
        return {
            (level, group): tuple(server for server in self.members(level, group) if nics[server][level])
            for level in range(self.levels)
            for group in range(self.wiring.n_groups(level))
        }

    @cached_property
    def _graph(self) -> nx.Graph:
        import networkx as nx  # here, as it takes half a second, and no job needs it

        graph = nx.Graph()
        graph.add_nodes_from(self.servers)
        graph.add_nodes_from(self.switches)
        for level, group in self.switches:
            graph.add_edges_from((server, (level, group)) for server in self.attached(level, group))
        return nx.freeze(graph)

    def _check(self, failure: Failure) -> None:
        match failure:
            case ServerFailure(server):
                self._check_server(server)
            case LinkFailure(server, level):
                self._check_server(server)
                self._check_level(level)
                if self.group(server, level) < 0:
                    wired = [own for own in range(self.levels) if self.group(server, own) >= 0]
                    raise UsageError(
                        f"server {server} of {self.name} has no NIC of level {level}: its levels are {wired}"
                    )
            case SwitchFailure(level, group):
                self._check_level(level)
                last = self.wiring.n_groups(level) - 1
                if not 0 <= group <= last:
                    raise UsageError(
                        f"{self.name} has switches {level}/0 to {level}/{last} at level {level}, "
                        f"there is no switch {level}/{group}"
                    )

    def _check_server(self, server: int) -> None:
        if not 0 <= server < self.n_servers:
            raise UsageError(f"{self.name} has servers 0-{self.n_servers - 1}, there is no server {server}")

    def _check_level(self, level: int) -> None:
        if not 0 <= level < self.levels:
            raise UsageError(f"{self.name} has levels 0-{self.levels - 1}, there is no level {level}")


@lru_cache(maxsize=64)
def _groups(wiring: Wiring) -> NDArray[np.int32]:
    """See `Fabric.groups`; the same for all fabrics of a wiring, whatever is dead."""
    table = np.full((wiring.n_servers, wiring.levels), -1, np.int32)
    for level in range(wiring.levels):
        for group in range(wiring.n_groups(level)):
            table[list(wiring.members(level, group)), level] = group
    table.setflags(write=False)
    return table


def _exact_rate(given: int | str | Fraction, link: str) -> Fraction:
    readable = not isinstance(given, str) or _RATE.fullmatch(given.strip()) is not None
    try:
        rate = Fraction(given) if readable else Fraction(0)
    except (ValueError, ZeroDivisionError, TypeError):
        rate = Fraction(0)
    if isinstance(given, float) or rate <= 0 or max(rate.numerator, rate.denominator) >= _MOST_OF_RATE:
        possible = "2, 0.4 or 2/5" if isinstance(given, str) else "2, '0.4' or Fraction(2, 5)"
        raise UsageError(
            f"rate {given!r:.80} of link {link}: write a positive exact number such as {possible}, "
            "of at most 30 digits"
        )
    return rate
