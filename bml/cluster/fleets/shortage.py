"""Decides when a job asks for machines, and for how many servers. Pure: time is an argument.

What Ray's autoscaler is asked for holds until it is asked for something else, and is what the whole cluster
must be able to hold. So a job asks for all of its servers while one is missing, and then takes that back: the
machines on which servers run are busy, and stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection

PATIENCE_S = 90.0
"""How long machines are asked for after a start failed, in seconds: awaited servers start again sooner."""


class Shortage:
    """The servers that are missing: each from its start to its arrival, or for a while after it failed."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        self._asked: int | None = 0

    @property
    def is_asked(self) -> bool:
        """Whether something that was asked for may stand."""
        return self._asked != 0

    def starts(self, server: int) -> None:
        """A server that is lost, or has not come yet, is started."""
        self._until[server] = math.inf

    def came(self, server: int) -> None:
        """It is there."""
        self._until.pop(server, None)

    def failed(self, server: int, now: float) -> None:
        """It did not come."""
        self._until[server] = now + PATIENCE_S

    def change(self, here: Collection[int], now: float) -> int | None:
        """Return for how many servers to ask now, beside those that are `here`; None: nothing changes.

        0 takes back what was asked for.
        """
        self._until = {server: until for server, until in self._until.items() if now < until}
        wanted = len({*here, *self._until}) if self._until else 0
        if wanted == self._asked:
            return None
        self._asked = wanted
        return wanted

    def not_asked(self) -> None:
        """What `change` returned could not be asked for: it returns it again."""
        self._asked = None

    def end(self) -> int | None:
        """The job is over; returns 0 if something is to be taken back."""
        self._until.clear()
        return self.change((), 0.0)
