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
WHOLE_NBYTES = 2 << 20
"""Additions of so many bytes, over all contributions, cost no more than another meeting."""


@dataclass(frozen=True)
class DirectProgram:
    """What one server does.

    Attributes:
        server: its id.
        members: all live servers, in id order.
        grain_nbytes: shares begin at multiples of this.
        whole_nbytes: up to so many bytes of all contributions together, everybody adds all.
    """

    server: int
    members: tuple[int, ...]
    grain_nbytes: int = SHARE_GRAIN_NBYTES
    whole_nbytes: int = WHOLE_NBYTES

    def adds_whole(self, nbytes: int) -> bool:
        """Whether everybody adds the whole vector of so many bytes."""
        return nbytes * len(self.members) <= self.whole_nbytes

    def share_elements(self, n_elements: int, itemsize: int) -> int:
        """Length of every share but the last ones, which may be shorter or empty.

        `itemsize` is a power of two, at most the grain.
        """
        grains = -(-n_elements * itemsize // self.grain_nbytes)
        return -(-grains // len(self.members)) * self.grain_nbytes // itemsize

    def share(self, n_elements: int, itemsize: int) -> tuple[int, int]:
        """Elements (start, stop) that this server adds."""
        size = self.share_elements(n_elements, itemsize)
        start = self.members.index(self.server) * size
        return min(start, n_elements), min(start + size, n_elements)
