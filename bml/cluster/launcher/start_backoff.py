"""Decides when servers that have not come yet are started. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Container, Iterable

AGAIN_S = 2.0
"""After how many seconds a server that did not come is started again, the first time; then twice as long."""
MOST_AGAIN_S = 60.0  # no pause is longer: a machine may be there again at any time


class StartBackoff:
    """The servers that a job waits for after it has begun without them, each until it is a member."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}

    def begin(self, late: Iterable[int], now: float) -> None:
        """These servers are to come."""
        for server in late:
            self._due[server], self._pause_s[server] = now, AGAIN_S

    @property
    def awaited(self) -> list[int]:
        """The servers that are still to come."""
        return sorted(self._pause_s)

    def due(self, now: float) -> list[int]:
        """Return the servers that are to be started now, each once until it has failed."""
        found = sorted(server for server, at in self._due.items() if now >= at)
        for server in found:
            del self._due[server]
        return found

    def failed(self, server: int, now: float) -> bool:
        """A server did not come: returns whether it was awaited, and is started again."""
        if server not in self._pause_s:
            return False
        pause_s = self._pause_s[server]
        self._due[server], self._pause_s[server] = now + pause_s, min(2 * pause_s, MOST_AGAIN_S)
        return True

    def give_up(self, server: int) -> None:
        """A server is not to be started again."""
        self._due.pop(server, None)
        self._pause_s.pop(server, None)

    def came_in(self, members: Container[int]) -> None:
        """These servers are members of the view."""
        for server in [each for each in self._pause_s if each in members]:
            self.give_up(server)
