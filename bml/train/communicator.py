"""The interface between a session and the runtime below it: one step, committed or to be prepared again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt
from msgspec import Struct

from bml.faults.busy import Slowdown
from bml.protocol.server.transfer import SegmentedBytes
from bml.protocol.step.workspace import Array, Padded
from bml.protocol.wire.messages import View


class Committed(Struct, frozen=True):
    """Every live server has committed the step.

    `result` is new memory of the caller, or, if that was allowed, read-only memory that all share.
    """

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
    """The runtime of one server, as its session sees it."""

    server: int
    job: str
    """The name of the job: no other one has it."""
    slowdown: Slowdown
    """What faults make of the training function's computation."""

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers with which the job began, including lost ones."""
        ...

    @property
    def n_servers(self) -> int:
        """See Session.n_servers."""
        ...

    @property
    def joins(self) -> bool:
        """Whether this server joins while the job runs."""
        ...

    def clock(self) -> float:
        """The seconds of a clock of this server, of which only differences count."""
        ...

    def show_shares(self, shares: dict[str, Any] | None, news: str) -> None:
        """Show how batches are shared from now on in the status, and log the news, if there are any.

        `bml.train.balancing.shown.shown` makes `shares`.
        """
        ...

    def show_checkpoints(self, shown: Callable[[], dict[str, Any]]) -> None:
        """Let the status and the report show what `shown` returns; any thread may call it."""
        ...

    def joined(self) -> memoryview | None:
        """Wait for the training state if this server joins and needs one now, and return it; else None.

        A server that has fallen too far behind the others needs a later state.
        """
        ...

    @property
    def replays(self) -> bool:
        """See Session.replays."""
        ...

    def begin_iteration(self) -> None:
        """Decide whether the iteration that begins replays steps that the others have committed.

        A joiner that has applied all committed steps waits, once, for the step that the others are in. At
        their boundary it says that it can contribute. Raises the error that ended the job.
        """
        ...

    def boundary(self, state: Callable[[], SegmentedBytes]) -> None:
        """Pass the boundary between two steps: joiners are sent `state()`, which does not change meanwhile.

        If this server was asked to leave, raises the error that ends the job on it.
        """
        ...

    @property
    def view(self) -> View:
        """The view in force."""
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in memory that is sent without a copy."""
        ...

    @property
    def piece_nbytes(self) -> int:
        """About how long a piece of a step with a priority is, in bytes; the same on all servers."""
        ...

    @property
    def leaves(self) -> bool:
        """Whether this server was asked to leave, at the next boundary."""
        ...

    def sync(
        self,
        epoch: int,
        contribution: Array | Padded,
        op: str,
        text: str,
        signature: int,
        shared: bool = False,
    ) -> Outcome:
        """Synchronise the next step; see bml.cluster.server.server.Server.sync."""
        ...
