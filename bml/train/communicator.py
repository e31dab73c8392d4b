"""What a Session needs from below: one step, synchronised with everybody, or asked for again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy.typing as npt

from bml.protocol.messages import View
from bml.protocol.workspace import Array


@dataclass(frozen=True)
class Committed:
    """The step is committed by every live server; `result` is new memory, the caller's own, or
    read-only memory that all share if that was allowed."""

    step: int
    epoch: int
    contributors: tuple[int, ...]
    result: Array


@dataclass(frozen=True)
class Retried:
    """The view changed before the step was committed: prepare the contribution for this `epoch`."""

    step: int
    epoch: int


Outcome = Committed | Retried


class Communicator(Protocol):
    """A server's link to the others."""

    server: int

    @property
    def servers(self) -> tuple[int, ...]:
        """All servers of the job's fabric, lost ones too."""
        ...

    @property
    def view(self) -> View:
        """The view in force."""
        ...

    @property
    def step(self) -> int:
        """Number of the next step; the first is 1."""
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in memory that is sent without a copy."""
        ...

    def sync(
        self, epoch: int, contribution: Array, op: str, text: str, signature: int, shared: bool = False
    ) -> Outcome:
        """Synchronise the next step; see bml.cluster.server.Server.sync."""
        ...
