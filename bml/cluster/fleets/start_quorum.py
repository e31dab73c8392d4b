"""Decides when a job begins, and with which of its servers. Pure: time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bml.errors import StartError
from bml.topology import Fabric, ServerFailure

OTHERS_S = 1.0
"""How long the job waits for the other servers once the least are there, in seconds."""


class StartQuorum:
    """The `servers` of a job on their way; times are seconds of one clock.

    It begins when `least` servers are there that can reach each other, and the other servers have come,
    cannot come, or have had `OTHERS_S` for it; or never, if that is not so within `start_s`.
    """

    def __init__(self, fabric: Fabric, servers: Iterable[int], least: int | None, start_s: float, now: float):
        """`least`: None for all."""
        self._fabric = fabric
        self._servers = frozenset(servers)
        self._least = len(self._servers) if least is None else least
        self._start_s = start_s
        self._deadline = now + start_s
        self._enough_at = math.inf
        self._obstacles: dict[int, StartError] = {}
        self.here: set[int] = set()
        """The servers that have come."""

    def came(self, server: int, now: float) -> None:
        """A server is there."""
        self.here.add(server)
        if self._enough_at == math.inf and self._is_enough():
            self._enough_at = now

    def failed(self, server: int, obstacle: StartError) -> None:
        """A server cannot come. Raises StartError if the others are too few."""
        self._obstacles[server] = obstacle
        if len(self._servers) - len(self._obstacles) < self._least:
            if self._least == len(self._servers):
                raise obstacle
            raise StartError(self._too_few())

    def begins(self, now: float) -> bool:
        """Whether the job begins now. Raises StartError when it is too late for that."""
        if self._enough_at < math.inf:
            return not self.awaited or now >= self._enough_at + OTHERS_S
        if now > self._deadline or not self.awaited:
            raise StartError(self._too_few())
        return False

    def patience_s(self, now: float) -> float:
        """For how many seconds nothing is decided if no server comes."""
        until = self._deadline if self._enough_at == math.inf else self._enough_at + OTHERS_S
        return max(0.0, until - now)

    @property
    def awaited(self) -> list[int]:
        """The servers that may still come."""
        return sorted(self._servers - self.here - self._obstacles.keys())

    def _is_enough(self) -> bool:
        if len(self.here) < self._least:
            return False
        absent = (server for server in self._fabric.servers if server not in self.here)
        return self._fabric.without(*map(ServerFailure, absent)).is_connected

    def _too_few(self) -> str:
        if self._least == len(self._servers):
            return f"server {self.awaited[0]} did not start in time"
        why = "".join(f"; {obstacle}" for obstacle in self._obstacles.values())
        cannot = "" if len(self.here) < self._least else ", and these cannot reach each other"
        return (
            f"the job begins with {self._least} servers or more: of {len(self._servers)}, {len(self.here)} "
            f"came within {self._start_s:g} s{cannot}{why}"
        )
