"""The memory that the simulated servers of one host see of each other: status pages and shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from bml.protocol.step.workspace import Array

NOTHING: Array = np.empty(0)


@dataclass
class StatusPage:
    """The status page of one incarnation of a server, and its memory.

    Where it stands, its contribution, whether its user reads the result in place, which result set it has
    chosen, which ones its user still reads, and per result set its shares.
    """

    standing: int = 0
    contribution: Array = field(default_factory=lambda: NOTHING)
    in_place: bool = False
    chosen: int = 0
    held: set[int] = field(default_factory=set)
    shares: dict[int, Array] = field(default_factory=dict)


@dataclass
class Host:
    """The status page of every server's newest incarnation, and how those that wait look again."""

    status_pages: dict[int, StatusPage] = field(default_factory=dict)
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)

    def free_set(self) -> int:
        """The first result set that no server reads in place."""
        held = set[int]().union(*(page.held for page in self.status_pages.values()))
        return next(number for number in count() if number not in held)
