"""BCube: n^k servers with k NICs; a level-l switch joins the n servers that differ in digit l only.

Source: Guo et al., "BCube: A High Performance, Server-centric Network Architecture for Modular Data
Centers", SIGCOMM 2009. Papers differ in notation; `bcube:4x2` is always ports x levels here.
"""

from __future__ import annotations

from dataclasses import dataclass

from bml.topology.errors import UsageError
from bml.topology.fabric import Fabric
from bml.topology.limits import MAX_SERVERS
from bml.topology.wiring import Hop, InnerLink


@dataclass(frozen=True)
class BCube:
    """Numbering of BCube: server id = sum of a_i n^i; group = the digits other than a_l, likewise.

    `ports` of a switch (n) and `levels` of switches, which are the NICs of a server (k).
    """

    ports: int
    levels: int

    @property
    def name(self) -> str:
        """Notation, `bcube:` ports x levels."""
        return f"bcube:{self.ports}x{self.levels}"

    @property
    def n_servers(self) -> int:
        """n^k."""
        return int(self.ports**self.levels)

    @property
    def is_product(self) -> bool:
        """Digits are independent: correcting one after the other leads anywhere."""
        return True

    def n_groups(self, level: int) -> int:
        """n^(k-1) switches at every level."""
        return self.n_servers // self.ports

    def address(self, server: int) -> tuple[int, ...]:
        """Digits of a server in base n, a_0 first."""
        return tuple(server // self.ports**i % self.ports for i in range(self.levels))

    def server_at(self, address: tuple[int, ...]) -> int:
        """Server with these digits. Raises UsageError if they are not k digits below n."""
        if len(address) != self.levels or not all(0 <= digit < self.ports for digit in address):
            raise UsageError(
                f"{address} is no address of {self.name}: it takes {self.levels} digits from 0 to "
                f"{self.ports - 1}"
            )
        return int(sum(digit * self.ports**i for i, digit in enumerate(address)))

    def group(self, server: int, level: int) -> int:
        """Digits other than a_level, lowest first, read as a number."""
        low = self.ports**level
        return int(server // (low * self.ports) * low + server % low)

    def members(self, level: int, group: int) -> tuple[int, ...]:
        """The n servers that share all digits but a_level."""
        low = self.ports**level
        first = group // low * low * self.ports + group % low
        return tuple(range(first, first + low * self.ports, low))

    def route(self, source: int, target: int, turn: int = 0) -> tuple[Hop, ...]:
        """Digits that differ are corrected one by one, from level `turn` upwards and round."""
        hops: list[Hop] = []
        at = source
        for level in ((turn + i) % self.levels for i in range(self.levels)):
            low = self.ports**level
            to = at + (target // low % self.ports - at // low % self.ports) * low
            if to != at:
                hops.append((at, level, to))
                at = to
        return tuple(hops)

    def inner_path(self, source: int, target: int, flow: int) -> tuple[InnerLink, ...]:
        """Switches are single devices."""
        return ()


def bcube(ports: int, levels: int) -> Fabric:
    """Build a healthy BCube, for example `bcube(3, 2)` with nine servers.

    Raises:
        UsageError: fewer than 2 ports, fewer than 1 level, or more than 65536 servers.
    """
    if ports < 2:
        raise UsageError(f"bcube:{ports}x{levels} cannot be: a switch needs at least 2 ports")
    if levels < 1:
        raise UsageError(f"bcube:{ports}x{levels} has {levels} levels, a server needs at least 1 NIC")
    if levels > 16 or ports**levels > MAX_SERVERS:
        raise UsageError(
            f"bcube:{ports}x{levels} would have {ports}^{levels} servers, at most {MAX_SERVERS} are supported"
        )
    return Fabric(BCube(ports, levels))
