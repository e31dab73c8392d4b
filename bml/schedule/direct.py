"""Direct reduction, for servers of one host that see each other's memory: there is nothing to route.

Every server adds its share of the vector straight from the contributions of all servers, in the order of
their ids, into memory of its own that all others can read; the result is the shares one behind the other.
A small vector is added whole by everybody instead: that saves a meeting of all servers, which costs more
than the additions. Either way all servers add the same terms in the same order, so all hold the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE_GRAIN_NBYTES = 4096
"""Shares begin at multiples of this: a page, so that they can be mapped one behind the other."""
WHOLE_NBYTES = 256 << 10
"""Additions of so many bytes, over all contributions, cost no more than another meeting."""


@dataclass(frozen=True)
class DirectProgram:
    """What one server does.

    Attributes:
        server: its id.
        members: all live servers, in id order.
    """

    server: int
    members: tuple[int, ...]

    def adds_whole(self, nbytes: int) -> bool:
        """Whether everybody adds the whole vector of so many bytes."""
        return nbytes * len(self.members) <= WHOLE_NBYTES

    def share_nbytes(self, nbytes: int) -> int:
        """Size of every share but the last ones, which may be shorter or empty."""
        grains = -(-nbytes // SHARE_GRAIN_NBYTES)
        return -(-grains // len(self.members)) * SHARE_GRAIN_NBYTES

    def share(self, n_elements: int, itemsize: int) -> tuple[int, int]:
        """Elements (start, stop) that this server adds; `itemsize` is a power of two up to the grain."""
        size = self.share_nbytes(n_elements * itemsize) // itemsize
        start = self.members.index(self.server) * size
        return min(start, n_elements), min(start + size, n_elements)
