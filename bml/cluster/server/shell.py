"""A server round its core: the core is pure, the shell brings it events and has its instructions carried out.

Events come from the transport (`arrivals`), the coordinator's line, the NICs, the training thread and the
clock (`loop`). The parts are made in `assembly`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from bml.cluster.injection.injection import Injection
from bml.cluster.server.execution import Execution
from bml.cluster.server.nics import Nics
from bml.cluster.server.peers import Peers
from bml.cluster.spec.trace import Trace
from bml.cluster.steps.handover import Handover
from bml.cluster.steps.mailbox import Mailbox
from bml.cluster.steps.runner import StepRunner
from bml.faults.busy import Slowdown
from bml.io.poller import Poller
from bml.protocol.record.recorded import RecordedCore
from bml.protocol.server import events as ev
from bml.train.balancing.throughput import SizeSummary, Throughput
from bml.transport.choice import Opened
from bml.transport.links.stand_in import StandIn


class ServerShell(ABC):
    """The parts of one server, and the ways in which events come to its core."""

    poller: Poller
    """The thread that uses the core and all below it holds the guard: the thread that polls, or over shared
    memory the training thread."""
    mailbox: Mailbox
    handover: Handover
    trace: Trace | None
    opened: Opened
    peers: Peers
    core: RecordedCore
    injection: Injection
    runner: StepRunner
    execution: Execution
    nics: Nics
    stand_in: StandIn

    slowdown: Slowdown
    shares: dict[str, Any] | None = None
    """How the training function's batches are shared, if not equally."""
    checkpoints: Callable[[], dict[str, Any]] | None = None
    """Says what is known of checkpoints, if the job makes any."""
    throughput: Throughput | None = None
    """The steps of the training function's session."""

    def __init__(self) -> None:
        self._requests: deque[ev.Event | Callable[[], None]] = deque()

    def request(self, request: ev.Event | Callable[[], None]) -> None:
        """Bring an event to the core, or call something, in the thread that polls. Any thread may ask."""
        self.queue(request)
        self.poller.wake()

    def queue(self, request: ev.Event | Callable[[], None]) -> None:
        """Have the thread that polls take it when it looks next."""
        self._requests.append(request)

    def take_requests(self) -> None:
        """Bring the queued events to the core; under the guard."""
        while self._requests:
            request = self._requests.popleft()
            if callable(request):
                request()
                continue
            self.dispatch(request)
            if isinstance(request, ev.Ended):
                self.execution.user_ended()

    def dispatch(self, event: ev.Event) -> None:
        """Bring an event to the core, and carry out its instructions; under the guard."""
        self.execution.execute(self.core.handle(event, time.monotonic()))

    def apply_faults(self) -> None:
        """Apply the faults that are due; called wherever something may have brought a moment of the plan."""
        if self.injection.armed:
            self.injection.poll(self.core, time.monotonic())

    def sizes(self) -> dict[int, SizeSummary]:
        """Return the steps of the session by the number of servers that contributed; any thread may ask."""
        return self.throughput.summary() if self.throughput else {}

    @abstractmethod
    def slice_nbytes(self, nbytes: int) -> int:
        """Return the length of the slices of a step of so many bytes."""

    @abstractmethod
    def predicted(self) -> dict[str, Any] | None:
        """Return what is predicted for the view in force, and what was measured; see Forecast."""

    @abstractmethod
    def remaining(self, now: float) -> dict[str, float] | None:
        """Return the seconds that are left; see Forecast."""

    @abstractmethod
    def warnings(self, now: float) -> list[dict[str, Any]]:
        """Return the early warnings that stand; see Forecast."""

    @abstractmethod
    def tell_heard(self) -> None:
        """Tell the core which peers were heard since it was told last."""

    @abstractmethod
    def close(self) -> None:
        """Free sockets and memory; only when the loop does not run."""
