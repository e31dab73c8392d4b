"""Torus: n^h servers in rings; a direct cable joins neighbours, so a "switch" is a cable with two ends.

Every dimension is a ring of n servers and every server has two cables in it, one each way. So that both
ends of a cable are NICs of one level, as everywhere else, the cables of a ring are coloured in turn: the
cable from coordinate x to x+1 has colour 0 for even x and 1 for odd x. A ring of odd n needs a third
colour for the cable that closes it, from n-1 to 0. Level = dimension * colours + colour. A server of an
odd ring has two NICs of the three levels; the third is not wired (`group` is -1).

With n = 2 the two neighbours of a dimension are one server, joined by two cables.
"""

from __future__ import annotations

from dataclasses import dataclass

from bml.topology.errors import UsageError
from bml.topology.fabric import Fabric
from bml.topology.limits import MAX_SERVERS
from bml.topology.wiring import Hop, InnerLink


@dataclass(frozen=True)
class Torus:
    """Numbering of a torus: server id = sum of a_i n^i. `size` of a ring (n) and number of `dimensions` (h).

    Group of a cable: the ring's number (the digits other than a_d, lowest first, read as a number) times
    the cables of this colour in a ring, plus the cable's number in its colour.
    """

    size: int
    dimensions: int

    @property
    def name(self) -> str:
        """Notation, `torus:` size x dimensions."""
        return f"torus:{self.size}x{self.dimensions}"

    @property
    def n_servers(self) -> int:
        """n^h."""
        return int(self.size**self.dimensions)

    @property
    def colours(self) -> int:
        """Levels per dimension: 2, or 3 if the rings are odd."""
        return 2 + self.size % 2

    @property
    def levels(self) -> int:
        """NICs of a server, the unwired one of odd rings counted."""
        return self.dimensions * self.colours

    @property
    def ports(self) -> int:
        """A cable has two ends."""
        return 2

    @property
    def is_product(self) -> bool:
        """A cable reaches one neighbour, not the whole ring."""
        return False

    def n_groups(self, level: int) -> int:
        """Count the cables of a level."""
        return self.n_servers // self.size * self._cables(level % self.colours)

    def address(self, server: int) -> tuple[int, ...]:
        """Coordinates of a server, a_0 first."""
        return tuple(server // self.size**i % self.size for i in range(self.dimensions))

    def server_at(self, address: tuple[int, ...]) -> int:
        """Server at these coordinates. Raises UsageError if they are not h numbers below n."""
        if len(address) != self.dimensions or not all(0 <= x < self.size for x in address):
            raise UsageError(
                f"{address} is no address of {self.name}: it takes {self.dimensions} coordinates from 0 to "
                f"{self.size - 1}"
            )
        return int(sum(x * self.size**i for i, x in enumerate(address)))

    def group(self, server: int, level: int) -> int:
        """Cable of the level at this server, -1 if it has none."""
        dimension, colour = divmod(level, self.colours)
        low = self.size**dimension
        x = server // low % self.size
        for cable in (x, (x - 1) % self.size):
            if self._colour(cable) == colour:
                ring = server // (low * self.size) * low + server % low
                number = 0 if colour == 2 else cable // 2
                return int(ring * self._cables(colour) + number)
        return -1

    def members(self, level: int, group: int) -> tuple[int, ...]:
        """The two servers that the cable joins, lower id first."""
        dimension, colour = divmod(level, self.colours)
        low = self.size**dimension
        ring, number = divmod(group, self._cables(colour))
        first = ring // low * low * self.size + ring % low
        x = self.size - 1 if colour == 2 else 2 * number + colour
        ends = (first + x * low, first + (x + 1) % self.size * low)
        return min(ends), max(ends)

    def step(self, server: int, dimension: int, direction: int) -> Hop:
        """Hop to the next server along a dimension; direction is +1 or -1."""
        low = self.size**dimension
        x = server // low % self.size
        to = (x + direction) % self.size
        cable = x if direction > 0 else to
        return server, dimension * self.colours + self._colour(cable), server + (to - x) * low

    def route(self, source: int, target: int, turn: int = 0) -> tuple[Hop, ...]:
        """Dimension by dimension, the short way round; half way round, an odd `turn` goes backwards."""
        hops: list[Hop] = []
        for dimension, (a, b) in enumerate(zip(self.address(source), self.address(target), strict=True)):
            ahead = (b - a) % self.size
            back = self.size - ahead
            direction = 1 if ahead < back or (ahead == back and turn % 2 == 0) else -1
            for _ in range(min(ahead, back)):
                hops.append(self.step(hops[-1][2] if hops else source, dimension, direction))
        return tuple(hops)

    def inner_path(self, source: int, target: int, flow: int) -> tuple[InnerLink, ...]:
        """Cables have no inside."""
        return ()

    def _colour(self, cable: int) -> int:
        """Colour of the cable from coordinate `cable` to the next one."""
        return 2 if self.size % 2 and cable == self.size - 1 else cable % 2

    def _cables(self, colour: int) -> int:
        """Cables of one colour in one ring."""
        return 1 if colour == 2 else self.size // 2


def torus(size: int, dimensions: int) -> Fabric:
    """Build a healthy torus, for example `torus(4, 2)` with 16 servers of four NICs.

    Raises:
        UsageError: rings of fewer than 2 servers, fewer than 1 dimension, or more than 65536 servers.
    """
    name = f"torus:{size}x{dimensions}"
    if size < 2:
        raise UsageError(f"{name} has rings of {size} server(s), a ring needs at least 2")
    if dimensions < 1:
        raise UsageError(f"{name} has {dimensions} dimensions, it needs at least 1")
    if dimensions > 16 or size**dimensions > MAX_SERVERS:
        raise UsageError(
            f"{name} would have {size}^{dimensions} servers, at most {MAX_SERVERS} are supported"
        )
    return Fabric(Torus(size, dimensions))
