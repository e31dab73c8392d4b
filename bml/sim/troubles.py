"""Which servers could be reached by all, and since when: what nobody in the run itself can know.

A server that runs, whose control connection holds and whose NICs work gives nobody a reason to evict it. What
befalls one of its neighbours may still be explained by its failure, and that explanation is wrong then. Only
where two neighbours fail it can be the simplest one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from topology import Fabric

Nic = tuple[int, int]
"""(server, level)."""

_RECENT_S = 6.0
"""For so long trouble that is over may still have consequences: silence is borne, answers are awaited."""


class Troubles:
    """Until when each server of `fabric` is, or was, in trouble; times are virtual seconds."""

    def __init__(self, fabric: Fabric):
        self._fabric = fabric
        self._own: dict[int, float] = {}
        self._beside: defaultdict[int, dict[Nic, float]] = defaultdict(dict)

    def befall(self, servers: Iterable[int], until_s: float) -> None:
        """These servers cannot be reached by all until then."""
        for server in servers:
            self._own[server] = max(until_s, self._own.get(server, 0.0))

    def silence(self, nics: Iterable[Nic], until_s: float) -> None:
        """These NICs are dead until then: their servers, and those that hear them there, know it."""
        for server, level in nics:
            self.befall([server], until_s)
            for peer in self._fabric.neighbours(server, level):
                known = self._beside[peer]
                known[server, level] = max(until_s, known.get((server, level), 0.0))

    def across(self, part: frozenset[int]) -> set[int]:
        """The servers with a neighbour on the other side of this cut."""
        return {
            server
            for server in self._fabric.servers
            for level in range(self._fabric.levels)
            for peer in self._fabric.neighbours(server, level)
            if (server in part) != (peer in part)
        }

    def reachable(self, servers: Iterable[int], now_s: float) -> list[int]:
        """Those of these servers that all others could reach, or nearly all, all the time lately."""
        gone_s = now_s - _RECENT_S
        return [
            server
            for server in servers
            if self._own.get(server, gone_s) <= gone_s
            and sum(until_s > gone_s for until_s in self._beside[server].values()) < 2
        ]
