"""One big switch: N servers with one NIC each, any two one hop apart."""

from __future__ import annotations

from dataclasses import dataclass

from bml.topology.errors import UsageError
from bml.topology.fabric import Fabric
from bml.topology.limits import MAX_SERVERS
from bml.topology.wiring import Hop, InnerLink, server_of


@dataclass(frozen=True)
class BigSwitch:
    """Numbering of one switch of `ports` servers: its only level and group are 0; an address is the id."""

    ports: int

    @property
    def name(self) -> str:
        """Notation, `switch:` servers."""
        return f"switch:{self.ports}"

    @property
    def n_servers(self) -> int:
        """One per port."""
        return self.ports

    @property
    def levels(self) -> int:
        """One NIC a server."""
        return 1

    @property
    def is_product(self) -> bool:
        """All servers are in the one group."""
        return True

    def n_groups(self, level: int) -> int:
        """One switch."""
        return 1

    def address(self, server: int) -> tuple[int, ...]:
        """The id itself."""
        return (server,)

    def server_at(self, address: tuple[int, ...]) -> int:
        """Server of this port. Raises UsageError if there is none."""
        return server_of(address, self.n_servers, self.name)

    def group(self, server: int, level: int) -> int:
        """The one switch."""
        return 0

    def members(self, level: int, group: int) -> tuple[int, ...]:
        """All servers."""
        return tuple(range(self.n_servers))

    def route(self, source: int, target: int, turn: int = 0) -> tuple[Hop, ...]:
        """One hop."""
        return () if source == target else ((source, 0, target),)

    def inner_path(self, source: int, target: int, flow: int) -> tuple[InnerLink, ...]:
        """The switch is one device."""
        return ()


def big_switch(servers: int) -> Fabric:
    """Build one switch with so many servers, for example `big_switch(9)`.

    Raises:
        UsageError: fewer than 2 or more than 65536 servers.
    """
    if not 2 <= servers <= MAX_SERVERS:
        raise UsageError(f"switch:{servers} has {servers} server(s), it needs 2 to {MAX_SERVERS}")
    return Fabric(BigSwitch(servers))
