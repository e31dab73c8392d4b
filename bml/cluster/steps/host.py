"""The parts of a server that its step runner uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from bml.cluster.spec.trace import Trace
from bml.cluster.steps.handover import Handover
from bml.cluster.steps.mailbox import Mailbox, Reply
from bml.io.memory import Memory
from bml.io.spin import Spin
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.wire.frame import Header

Handlers = Mapping[type, Callable[[Any], None]]
"""The function that carries out each kind of instruction of the core."""


class Faults(Protocol):
    """The injected faults that are still to come on this server."""

    pending: tuple[Any, ...]

    def before_token(self, step: int, core: ServerCore, now: float) -> None:
        """The token of a step is about to leave."""
        ...


@dataclass(frozen=True)
class StepHost:
    """The parts of one server, for its step runner."""

    core: ServerCore
    memory: Memory
    mailbox: Mailbox
    handover: Handover
    faults: Faults
    guard: AbstractContextManager[object]
    """The lock under which a thread uses the core and all that it stands on; not reentrant."""
    answer: Callable[[ev.Event, Spin], Reply]
    """Bring an event to the core and poll until there is a reply, spinning before it sleeps."""
    execute: Callable[[Iterable[ev.Instruction]], None]
    """Carry out instructions in another thread than the loop's, under the guard."""
    apply_faults: Callable[[Header | None], None]
    """Apply the faults that are due: now (None), or as if a frame of this header moved."""
    beside: Callable[[], bool]
    """Whether the caller is another thread than the training thread, which may compute meanwhile."""
    one_host: Callable[[], bool]
    """Whether all servers of the job run on one machine."""
    trace: Trace | None
