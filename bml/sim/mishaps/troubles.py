"""The servers that all others could reach, and since when: more than any server in the run can know.

A server that runs, whose control connection holds and whose NICs work gives nobody a reason to evict it. What
befalls one of its neighbours may still be explained by its failure, and that explanation is wrong then. Only
where two neighbours fail it can be the simplest one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Set

from bml.sim.mishaps.chaos import Mishap
from bml.topology import Fabric

Nic = tuple[int, int]
"""(server, level)."""

_RECENT_S = 6.0
"""How long trouble that is over may still have effects: silence is tolerated, answers are awaited."""


class Troubles:
    """The times at which the trouble of each server of `fabric` ends, in virtual seconds."""

    def __init__(self, fabric: Fabric):
        self._fabric = fabric
        self._own: dict[int, float] = {}
        self._beside: defaultdict[int, dict[Nic, float]] = defaultdict(dict)

    def mark(self, servers: Iterable[int], until_s: float) -> None:
        """These servers cannot be reached by all until then."""
        for server in servers:
            self._own[server] = max(until_s, self._own.get(server, 0.0))

    def silence(self, nics: Iterable[Nic], until_s: float) -> None:
        """These NICs are dead until then: their servers, and those that hear them there, know it."""
        for server, level in nics:
            self.mark([server], until_s)
            for peer in self._fabric.neighbours(server, level):
                known = self._beside[peer]
                known[server, level] = max(until_s, known.get((server, level), 0.0))

    def note(self, mishap: Mishap, now_s: float) -> None:
        """Note the servers that others cannot reach for it; a broken connection can be made again at once."""
        lasts_s = 0.0 if mishap.kind in ("reset", "control-loss", "join") else mishap.for_s
        until_s = now_s + lasts_s
        match mishap.kind, mishap.target:
            case (("silent" | "deaf" | "mute"), (server, level)):
                self.silence([(server, level)], until_s)
            case "switch", (level, group):
                self.silence(((each, level) for each in self._fabric.members(level, group)), until_s)
            case "partition" | "isolate", part:
                self.mark(self.across(frozenset(part)), until_s)
            case (("reset" | "stall" | "unheard" | "lossy"), (server, peer, _)):
                self.mark((server, peer), until_s)
            case (("coordinator-crash" | "coordinator-freeze" | "spare-crash" | "leave" | "busy"), _):
                pass  # a server that is asked to leave is reached until it says that it does
            case _, target:
                self.mark(target, until_s)

    def reached(self, server: int, relays: set[int], connects: Callable[[int, int, int], bool]) -> set[int]:
        """The servers that this one reaches through these relays; `connects(a, b, level)` neighbours."""
        found, new = {server}, [server]
        while new:
            at = new.pop()
            for level in range(self._fabric.levels):
                for peer in relays.intersection(self._fabric.neighbours(at, level)) - found:
                    if connects(at, peer, level):
                        found.add(peer)
                        new.append(peer)
        return found

    def across(self, part: frozenset[int]) -> set[int]:
        """The servers with a neighbour on the other side of this cut."""
        return {
            server
            for server in self._fabric.servers
            for level in range(self._fabric.levels)
            for peer in self._fabric.neighbours(server, level)
            if (server in part) != (peer in part)
        }

    def reachable(self, servers: Iterable[int], present: Set[int], now_s: float) -> list[int]:
        """The ones among these servers that all others, or nearly all, could reach during the last seconds.

        A server whose neighbours were all in trouble, or not `present`, hears no other, as if it were in
        trouble itself.
        """
        gone_s = now_s - _RECENT_S
        well = {server for server in present if self._own.get(server, gone_s) <= gone_s}
        return [
            server
            for server in servers
            if server in well
            and well & self._beside_of(server)
            and sum(until_s > gone_s for until_s in self._beside[server].values()) < 2
        ]

    def _beside_of(self, server: int) -> set[int]:
        levels = range(self._fabric.levels)
        return {peer for level in levels for peer in self._fabric.neighbours(server, level)}
