"""The layout of an emulated fabric: its namespaces, devices, addresses and cables. Pure.

A node is a namespace. Server i has the node NAME-s{i} with the NICs b0, b1, … (one per level), f0 (on the
one-switch network, for peers with one NIC) and m0 (on the management network). All switches are in the node
NAME-switches: the bridges sw{level}-{group}, `one-switch` and `management`. The cables of a torus have no
switch: they connect the nodes of two servers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from bml.topology import BCube, BigSwitch, Fabric, Graph, Link, LinkFailure, Switch, SwitchFailure, Torus
from bml.topology.errors import UsageError

DEFAULT_NAME = "bml"
MAX_SERVERS = 16
_MOST_LEVELS = 10
"""Each has a network of its own, 10.10 to 10.19."""
MTU = 1500
GOODPUT = 0.954
"""The fraction of a NIC's rate that TCP payload gets at an MTU of 1500, after all headers."""
SWITCHES = "switches"
ONE_SWITCH = "one-switch"
MANAGEMENT = "management"

_HOST_OF_COORDINATOR = 254
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_RATE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([kmg]?)bit")
_UNIT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST_BIT, _MOST_BIT = 8 * 10**3, 10 * 10**9


@dataclass(frozen=True)
class End:
    """One end of a cable: a device in a namespace, with an address (a NIC) or on a bridge (a port)."""

    node: str
    """`s4` or `switches`; the namespace is NAME-node."""
    device: str
    address: str | None = None
    bridge: str | None = None


@dataclass(frozen=True)
class Cable:
    """A veth pair. `links` are the fabric's links that it carries: one, two for a direct cable, or none."""

    near: End
    far: End
    network: str
    """`fabric`, `one-switch` or `management`."""
    links: tuple[Link, ...] = ()
    switch: Switch | None = None

    def end_of(self, server: int) -> End:
        """The end in this server's namespace."""
        return self.near if self.near.node == node_of(server) else self.far


@dataclass(frozen=True)
class Layout:
    """The names and addresses of an emulated `fabric` called `name`.

    Raises UsageError for a name that cannot be used, and for a fabric that cannot be emulated.
    """

    fabric: Fabric
    name: str = DEFAULT_NAME

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.fabric.wiring, BCube | Torus | BigSwitch | Graph):
            raise UsageError(f"{self.fabric.name} cannot be emulated: give a bcube, torus, switch or graph")
        if self.fabric.levels > _MOST_LEVELS:
            raise UsageError(
                f"{self.fabric.name} has {self.fabric.levels} levels, {_MOST_LEVELS} can be emulated"
            )
        if self.fabric.n_servers > MAX_SERVERS:
            raise UsageError(
                f"{self.fabric.name} has {self.fabric.n_servers} servers, {MAX_SERVERS} can be emulated"
            )
        if self.fabric.rates:
            raise UsageError(f"{self.fabric} cannot be emulated: all NICs have one rate there")
        if self.fabric.failures:
            raise UsageError(f"{self.fabric} is damaged: bring up the healthy one and break it then")

    @property
    def is_direct(self) -> bool:
        """Whether cables join servers and there are no switches."""
        return isinstance(self.fabric.wiring, Torus)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node: its namespace without the fabric's name."""
        return (SWITCHES, *(node_of(server) for server in self.fabric.servers))

    def namespace(self, node: str) -> str:
        """The name of a node's namespace."""
        return f"{self.name}-{node}"

    @property
    def bridges(self) -> tuple[str, ...]:
        """The devices of all switches."""
        own = () if self.is_direct else tuple(bridge_of(switch) for switch in self.fabric.switches)
        return (*own, ONE_SWITCH, MANAGEMENT)

    @cached_property
    def cables(self) -> tuple[Cable, ...]:
        """Every cable: those of the fabric, then two per server, to the networks beside it."""
        fabric = tuple(cable for switch in self.fabric.switches for cable in self._cables_of(switch))
        beside = tuple(
            Cable(
                End(node_of(server), device, f"{self._beside(network, server)}/24"),
                End(SWITCHES, f"{device}s{server}", bridge=network),
                network,
            )
            for server in self.fabric.servers
            for network, device in ((ONE_SWITCH, "f0"), (MANAGEMENT, "m0"))
        )
        return fabric + beside

    def cable(self, link: Link) -> Cable:
        """The cable of this link. Raises UsageError if the fabric has no such link."""
        self.fabric.without(LinkFailure(*link))
        return self._by_link[link]

    def cables_of(self, switch: Switch) -> tuple[Cable, ...]:
        """The cables of a switch; without switches, the direct cable. Raises UsageError if there is none."""
        self.fabric.without(SwitchFailure(*switch))
        return tuple(cable for cable in self.cables if cable.switch == switch)

    def nics(self, server: int) -> tuple[str, ...]:
        """Addresses of a server's NICs by level; loopback where a level is not wired (odd rings)."""
        return tuple(
            "127.0.0.1" if self.fabric.group(server, level) < 0 else self._nic(server, level)
            for level in range(self.fabric.levels)
        )

    def one_switch_address(self, server: int) -> str:
        """Address in the one-switch network."""
        return self._beside(ONE_SWITCH, server)

    def management_address(self, server: int) -> str:
        """Address in the management network."""
        return self._beside(MANAGEMENT, server)

    @property
    def coordinator_address(self) -> str:
        """Address of the namespace of the switches in the management network."""
        return f"10.30.0.{_HOST_OF_COORDINATOR}"

    @cached_property
    def _by_link(self) -> Mapping[Link, Cable]:
        return {link: cable for cable in self.cables for link in cable.links}

    def _nic(self, server: int, level: int) -> str:
        return f"10.{10 + level}.{self.fabric.group(server, level)}.{server + 1}"

    def _beside(self, network: str, server: int) -> str:
        return f"10.{20 if network == ONE_SWITCH else 30}.0.{server + 1}"

    def _cables_of(self, switch: Switch) -> tuple[Cable, ...]:
        level, group = switch
        members = self.fabric.members(level, group)
        ends = [End(node_of(each), f"b{level}", f"{self._nic(each, level)}/24") for each in members]
        links = [(each, level) for each in members]
        if self.is_direct:
            return (Cable(ends[0], ends[1], "fabric", tuple(links), switch),)
        return tuple(
            Cable(
                near,
                End(SWITCHES, f"b{level}s{link[0]}", bridge=bridge_of(switch)),
                "fabric",
                (link,),
                switch,
            )
            for near, link in zip(ends, links, strict=True)
        )


def node_of(server: int) -> str:
    """The node of a server."""
    return f"s{server}"


def bridge_of(switch: Switch) -> str:
    """The device, a bridge, of a switch."""
    return f"sw{switch[0]}-{switch[1]}"


def belongs(namespace: str, name: str) -> bool:
    """Whether a namespace has a name of the emulated fabric called `name`, whatever its shape."""
    return re.fullmatch(rf"{re.escape(name)}-(s[0-9]+|{SWITCHES})", namespace) is not None


def check_name(name: str) -> str:
    """Return `name`. Raises UsageError if it cannot be the name of an emulated fabric."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name: 1 to 16 lower-case letters and digits, a letter first")
    return name


def parse_rate(text: str) -> int:
    """Read a rate such as `200mbit`, `1gbit` or `500kbit`; returns bits per second. Raises UsageError."""
    found = _RATE.fullmatch(text.strip().lower())
    rate_bit = round(Fraction(found[1]) * _UNIT[found[2]]) if found else 0
    if not _LEAST_BIT <= rate_bit <= _MOST_BIT:
        raise UsageError(f"'{text}' is no rate: write it like 200mbit, from 8kbit to 10gbit")
    return rate_bit


def rate_text(rate_bit: int) -> str:
    """A rate in bits per second as a text that `parse_rate` reads."""
    for unit in ("g", "m", "k"):
        if rate_bit % _UNIT[unit] == 0:
            return f"{rate_bit // _UNIT[unit]}{unit}bit"
    return f"{rate_bit}bit"
