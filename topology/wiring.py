"""The cabling of a family of fabrics when nothing is broken: the names that a family must have."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from bml.topology.errors import UsageError

Hop: TypeAlias = tuple[int, int, int]
"""(from server, level, to server): one way over one switch."""
InnerNode: TypeAlias = tuple[int, int]
"""(layer, number) of a switch inside a network that servers see as one switch; layer 0 is next to them."""
InnerLink: TypeAlias = tuple[InnerNode, InnerNode]
"""One direction of a cable between two inner switches."""


def server_of(address: tuple[int, ...], n_servers: int, name: str) -> int:
    """Return the server whose address is its id alone. Raises UsageError if there is none."""
    if len(address) != 1 or not 0 <= address[0] < n_servers:
        raise UsageError(f"{address} is no address of {name}: it takes 1 number to {n_servers - 1}")
    return address[0]


class Wiring(Protocol):
    """The cabling of a family of fabrics when nothing is broken: numbering only, no state.

    A new family is one frozen, hashable class with these names.
    """

    def __hash__(self) -> int:
        """Equal for equal wirings."""

    @property
    def name(self) -> str:
        """Notation of the undamaged fabric, such as `bcube:3x2`."""

    @property
    def n_servers(self) -> int:
        """Number of servers, alive or not."""

    @property
    def levels(self) -> int:
        """NICs of a server."""

    @property
    def ports(self) -> int:
        """Ports of a switch."""

    @property
    def is_product(self) -> bool:
        """Whether tokens that go round the groups, level after level, once, reach every server."""

    def n_groups(self, level: int) -> int:
        """Count the switches of a level."""

    def address(self, server: int) -> tuple[int, ...]:
        """Digits of a server, a_0 first."""

    def server_at(self, address: tuple[int, ...]) -> int:
        """Server with these digits."""

    def group(self, server: int, level: int) -> int:
        """Switch of that level to which the server is cabled; -1 if it has no NIC of that level."""

    def members(self, level: int, group: int) -> tuple[int, ...]:
        """All servers cabled to a switch, in id order."""

    def route(self, source: int, target: int, turn: int = 0) -> tuple[Hop, ...]:
        """Return a shortest path; of several, `turn` picks one. Empty from a server to itself."""

    def inner_path(self, source: int, target: int, flow: int) -> tuple[InnerLink, ...]:
        """Inner links that a flow takes between two servers of one switch; empty if that is one device."""
