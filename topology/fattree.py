"""Fat-Tree: k-port switches in three layers; servers have one NIC and see the whole as one switch.

Each of the k pods has k/2 edge and k/2 aggregation switches, (k/2)^2 core switches join the pods, and
k/2 servers hang on an edge switch: k^3/4 servers, 5k^2/4 switches. Any two servers are one hop apart;
which inner links their traffic takes is chosen by ECMP, that is by a hash, so flows can collide.

Source: Al-Fares et al., "A Scalable, Commodity Data Center Network Architecture", SIGCOMM 2008.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from bml.topology.errors import FabricError, UsageError
from bml.topology.fabric import Fabric
from bml.topology.limits import MAX_SERVERS
from bml.topology.wiring import Hop, InnerLink, InnerNode

EDGE, AGGREGATION, CORE = 0, 1, 2
"""Layers of inner switches."""
LAYERS = ("edge", "aggregation", "core")
"""Their names."""


@dataclass(frozen=True)
class FatTree:
    """Numbering: servers fill edge switches, and these pods, in id order.

    Edge and aggregation switch i of pod p have number p·k/2 + i. Aggregation switch i of every pod is
    cabled to the core switches i·k/2 .. i·k/2 + k/2 - 1. k is `switch_ports`; `n_servers` is the number of
    places that are taken; `seed` is that of the ECMP hash; `dead` are inner switches that routing avoids.
    """

    switch_ports: int
    n_servers: int
    seed: int = 0
    dead: frozenset[InnerNode] = frozenset()

    @property
    def name(self) -> str:
        """Notation, `fattree:` ports of a switch, and the servers if not all places are taken."""
        full = self.switch_ports**3 // 4
        return f"fattree:{self.switch_ports}" + ("" if self.n_servers == full else f"/{self.n_servers}")

    @property
    def ports(self) -> int:
        """Ports of what servers see as one switch."""
        return self.n_servers

    @property
    def levels(self) -> int:
        """One NIC a server."""
        return 1

    @property
    def is_product(self) -> bool:
        """In principle so, but all-to-all tokens of a whole Fat-Tree would collide."""
        return False

    def n_groups(self, level: int) -> int:
        """One network."""
        return 1

    def address(self, server: int) -> tuple[int, ...]:
        """(place at its edge switch, edge switch in its pod, pod)."""
        half = self.switch_ports // 2
        return server % half, server // half % half, server // half**2

    def server_at(self, address: tuple[int, ...]) -> int:
        """Server with this address. Raises UsageError if there is none."""
        half = self.switch_ports // 2
        if len(address) == 3 and all(0 <= x < half for x in address[:2]) and address[2] >= 0:
            server = address[0] + half * (address[1] + half * address[2])
            if server < self.n_servers:
                return server
        raise UsageError(
            f"{address} is no address of {self.name}: it takes (place, edge switch, pod) of one of its "
            f"{self.n_servers} servers"
        )

    def group(self, server: int, level: int) -> int:
        """The one network."""
        return 0

    def members(self, level: int, group: int) -> tuple[int, ...]:
        """All servers."""
        return tuple(range(self.n_servers))

    def route(self, source: int, target: int, turn: int = 0) -> tuple[Hop, ...]:
        """One hop, as servers see it."""
        return () if source == target else ((source, 0, target),)

    def inner_path(self, source: int, target: int, flow: int) -> tuple[InnerLink, ...]:
        """Inner links of a flow: none below one edge switch, else up to where the two ends meet and down.

        Every switch on the way up takes one of its live uplinks by a hash of source, target, flow and
        itself, as ECMP does; the way down is then given.

        Raises:
            FabricError: dead inner switches part the two servers.
        """
        half = self.switch_ports // 2
        edge, last = source // half, target // half
        if edge == last:
            return ()
        pods = edge // half, last // half
        planes = [plane for plane in range(half) if self._joins(plane, *pods)] if self.dead else range(half)
        if not planes:
            raise FabricError(
                f"dead switches inside {self.name} part servers {source} and {target}: heal one of them"
            )
        plane = planes[self._hash(source, target, flow, EDGE, edge) % len(planes)]
        up, down = ((AGGREGATION, pod * half + plane) for pod in pods)
        nodes: list[InnerNode] = [(EDGE, edge), up]
        if up != down:
            cores = self._cores(plane) if self.dead else range(plane * half, (plane + 1) * half)
            nodes += [(CORE, cores[self._hash(source, target, flow, *up) % len(cores)]), down]
        nodes.append((EDGE, last))
        return tuple(pairwise(nodes))

    def _joins(self, plane: int, pod: int, other: int) -> bool:
        """Whether two pods, or a pod within itself, are joined over their aggregation switches of a plane."""
        half = self.switch_ports // 2
        alive = not any((AGGREGATION, each * half + plane) in self.dead for each in (pod, other))
        return alive and (pod == other or bool(self._cores(plane)))

    def _cores(self, plane: int) -> list[int]:
        """Live core switches of a plane."""
        half = self.switch_ports // 2
        return [core for core in range(plane * half, plane * half + half) if (CORE, core) not in self.dead]

    def _hash(self, source: int, target: int, flow: int, layer: int, number: int) -> int:
        mixed = self.seed
        for word in (source, target, flow, layer, number):
            mixed = _mix(mixed ^ word)
        return mixed


def _mix(x: int) -> int:
    """One step of splitmix64: a full-avalanche hash of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def fat_tree(switch_ports: int, servers: int | None = None, seed: int = 0) -> Fabric:
    """Build a Fat-Tree of k-port switches, for example `fat_tree(10)` with 250 servers.

    `servers` takes only so many of the k^3/4 places, in order; `seed` is that of the ECMP hash.

    Raises:
        UsageError: k is odd or below 2, too few or too many servers, or more than 65536 of them.
    """
    if switch_ports < 2 or switch_ports % 2:
        raise UsageError(f"fattree:{switch_ports} needs switches with an even number of ports, at least 2")
    places = switch_ports**3 // 4
    wanted = places if servers is None else servers
    if not 2 <= wanted <= places:
        raise UsageError(f"fattree:{switch_ports} has {places} places, it cannot have {wanted} servers")
    if wanted > MAX_SERVERS:
        raise UsageError(
            f"fattree:{switch_ports} would have {wanted} servers, at most {MAX_SERVERS} are supported"
        )
    return Fabric(FatTree(switch_ports, wanted, seed))


_INNER = re.compile(r"(aggregation|core):([0-9]{1,6})", re.ASCII)


def is_inner(text: str) -> bool:
    """Whether a failure is one of an inner switch: `core:3`, `aggregation:2`."""
    return _INNER.fullmatch(text.strip()) is not None


def without_inner(fabric: Fabric, failures: Iterable[str]) -> Fabric:
    """Return a Fat-Tree whose routing avoids dead inner switches: `core:3`, `aggregation:2`.

    The servers of a dead edge switch are lost: say so of each of them (`server:0`).

    Raises:
        UsageError: the fabric is no Fat-Tree, or has no such switch.
    """
    dead: set[InnerNode] = set()
    for text in failures:
        found = _INNER.fullmatch(text.strip())
        if found is None or not isinstance(fabric.wiring, FatTree):
            raise UsageError(
                f"'{text}' is no inner switch of {fabric.name}: a Fat-Tree has them, write core:3"
            )
        layer, number = LAYERS.index(found[1]), int(found[2])
        ports = fabric.wiring.switch_ports
        count = ports**2 // 4 if layer == CORE else ports**2 // 2
        if number >= count:
            raise UsageError(f"{fabric.name} has {found[1]} switches 0-{count - 1}, there is no {text}")
        dead.add((layer, number))
    if not dead:
        return fabric
    assert isinstance(fabric.wiring, FatTree)
    return replace(fabric, wiring=replace(fabric.wiring, dead=fabric.wiring.dead | dead))


def with_seed(fabric: Fabric, seed: int) -> Fabric:
    """Return the fabric with another seed of ECMP's hash; any other fabric than a Fat-Tree as it is."""
    if not isinstance(fabric.wiring, FatTree):
        return fabric
    return replace(fabric, wiring=replace(fabric.wiring, seed=seed))
