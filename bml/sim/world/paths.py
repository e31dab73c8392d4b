"""The paths of the simulated data network: which of them pass frames and heartbeats, each way on its own."""

from __future__ import annotations

import random
from typing import TypeAlias

Key: TypeAlias = tuple[int, int]
"""(server, level): one NIC."""
Pair: TypeAlias = tuple[int, int, int]
"""(lower server, higher server, level)."""
Where: TypeAlias = Key | Pair | frozenset[int]

KINDS = ("silent", "deaf", "mute", "stall", "unheard", "lossy", "parted")
LOST_SHARE = 0.6
"""Of the heartbeats on a lossy link."""


def pair(a: int, b: int, level: int) -> Pair:
    """The pair of these two neighbours."""
    return min(a, b), max(a, b), level


class Paths:
    """The blocks between servers, by `kind`; `where` names a NIC, a pair or a set of servers.

    A NIC: `silent` ones carry nothing, `deaf` ones bring nothing in, `mute` ones nothing out. A pair: between
    servers of a `stall` no frame passes, between `unheard` ones no heartbeat, and of the heartbeats of
    `lossy` ones LOST_SHARE are lost. A set of servers: it is `parted` from the others.
    """

    def __init__(self) -> None:
        self._blocked: dict[str, list[Where]] = {kind: [] for kind in KINDS}

    def block(self, kind: str, where: Where) -> None:
        """Begin to block this."""
        self._blocked[kind].append(where)

    def heal(self, kind: str, where: Where) -> None:
        """Undo one `block`; no effect without."""
        if where in self._blocked[kind]:
            self._blocked[kind].remove(where)

    def carries(self, origin: int, dest: int, level: int) -> bool:
        """Whether frames get from one to the other."""
        return pair(origin, dest, level) not in self._blocked["stall"] and self._passes(origin, dest, level)

    def connects(self, a: int, b: int, level: int) -> bool:
        """Whether frames get through both ways, as a connection needs that is being made."""
        return self.carries(a, b, level) and self.carries(b, a, level)

    def heartbeat_passes(self, origin: int, dest: int, level: int, chance: random.Random) -> bool:
        """Whether this heartbeat gets from one to the other."""
        between = pair(origin, dest, level)
        if between in self._blocked["unheard"] or not self._passes(origin, dest, level):
            return False
        return between not in self._blocked["lossy"] or chance.random() >= LOST_SHARE

    def _passes(self, origin: int, dest: int, level: int) -> bool:
        blocked, out, into = self._blocked, (origin, level), (dest, level)
        silent = blocked["silent"]
        if out in silent or into in silent or out in blocked["mute"] or into in blocked["deaf"]:
            return False
        return all((origin in part) == (dest in part) for part in blocked["parted"])
