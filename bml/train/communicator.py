"""What a Session needs from below: one step, synchronised with everybody, or asked for again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy.typing as npt
from msgspec import Struct

from bml.protocol.server.transfer import SegmentedBytes
from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View


class Committed(Struct, frozen=True):
    """The step is committed by every live server; `result` is new memory, the caller's own, or
    read-only memory that all share if that was allowed."""

    step: int
    epoch: int
    contributors: tuple[int, ...]
    result: Array


class Retried(Struct, frozen=True):
    """The view changed before the step was committed: prepare the contribution for this `epoch`."""

    step: int
    epoch: int


Outcome = Committed | Retried


class Communicator(Protocol):
    """A server's link to the others."""

    server: int

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers with which the job began, lost ones too."""
        ...

    @property
    def joins(self) -> bool:
        """Whether this server comes while the job runs."""
        ...

    def joined(self) -> memoryview | None:
        """The training state, if this server joined a running job and needs one now; waits until it is here.

        It needs another, later one if it has fallen behind the others.
        """
        ...

    @property
    def replays(self) -> bool:
        """See Session.replays."""
        ...

    def draw_level(self) -> None:
        """An iteration begins: find out whether it replays what the others have committed.

        A joiner that has applied everything waits, once, for the step that the others are in, then says,
        at their boundary, that it can contribute. Raises the error that ended the job.
        """
        ...

    def boundary(self, state: Callable[[], SegmentedBytes]) -> None:
        """Between two steps: joiners are given `state()`, which is not changed meanwhile.

        Raises the error that ends the job here if this server was asked to leave.
        """
        ...

    @property
    def view(self) -> View:
        """The view in force."""
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in memory that is sent without a copy."""
        ...

    def sync(
        self, epoch: int, contribution: Array, op: str, text: str, signature: int, shared: bool = False
    ) -> Outcome:
        """Synchronise the next step; see bml.cluster.server.server.Server.sync."""
        ...
