"""Direct reduction, for servers of one host that see each other's memory: there is nothing to route.

Every server adds its share of the vector straight from the contributions of all servers, in the order of
their ids, into memory of its own that all others can read; the result is the shares one behind the other.
Or every server adds the whole vector into its own result, which saves a meeting of all servers. Either way
all servers add the same terms in the same order, so all hold the same bits.

What costs is moving bytes. Of n contributions of P bytes each, a server moves

    whole                        reads n·P, writes P
    shares, copied               reads P, writes P/n twice; then reads and writes P - P/n
    shares, read where they lie  reads P, writes P/n

A server copies its own share block by block as it adds it, out of the cache. Whichever is less, a meeting
counted as `MEETING_NBYTES`, is done: two servers that want results of their own add everything whatever the
size, more of them only small vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

SHARE_GRAIN_NBYTES = 4096
"""Shares begin at multiples of this: a page, so that they can be mapped one behind the other."""
MEETING_NBYTES = 1 << 20
"""Moving so many bytes costs a server as much as another meeting."""


def adds_whole(n_servers: int, nbytes: int, in_place: bool, meeting_nbytes: int = MEETING_NBYTES) -> bool:
    """Whether every server adds the whole vector of so many bytes; `in_place`: some read it where it lies."""
    n = n_servers
    whole = (n + 1) * n * nbytes  # all times n, to stay with integers
    shares = (n + 1) * nbytes if in_place else 3 * n * nbytes
    return whole <= shares + n * meeting_nbytes


class Part(NamedTuple):
    """The part of one server in a vector: its share is elements [start, stop).

    All shares have the length `share`, but the last ones may be shorter or empty. `whole`: it adds everything
    instead, if no member reads the result where it lies; `whole_in_place`: even if one does.
    """

    start: int
    stop: int
    share: int
    whole: bool
    whole_in_place: bool


@dataclass(frozen=True, eq=False)
class DirectProgram:
    """The program of one server.

    Attributes:
        server: its id.
        members: all live servers, in id order.
        grain_nbytes: shares begin at multiples of this.
        meeting_nbytes: what a meeting costs; see the module's text.
    """

    server: int
    members: tuple[int, ...]
    grain_nbytes: int = SHARE_GRAIN_NBYTES
    meeting_nbytes: int = MEETING_NBYTES

    def adds_whole(self, nbytes: int, in_place: bool) -> bool:
        """See the function of this name."""
        return adds_whole(len(self.members), nbytes, in_place, self.meeting_nbytes)

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

    def part(self, n_elements: int, itemsize: int) -> Part:
        """All of it together; steps that are alike have the same."""
        return _part(self, n_elements, itemsize)


@lru_cache(maxsize=256)
def _part(program: DirectProgram, n_elements: int, itemsize: int) -> Part:
    start, stop = program.share(n_elements, itemsize)
    share = program.share_elements(n_elements, itemsize)
    nbytes = n_elements * itemsize
    return Part(start, stop, share, program.adds_whole(nbytes, False), program.adds_whole(nbytes, True))
