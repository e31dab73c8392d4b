"""Carries out, on this server itself, the faults that a plan has for it: real signals, real silence."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.server import ServerCore
from bml.transport.interface import Transport
from faults import Fault, FaultPlan
from faults.plan import AtTime, due
from topology import Fabric


class Injection:
    """The faults that are still to come on `server`; steps are the session's, counted from 1."""

    def __init__(
        self,
        server: int,
        plan: FaultPlan,
        fabric: Fabric,
        transport: Transport,
        tell: Callable[[msg.ToCoordinator], None],
    ):
        self._server = server
        self._transport = transport
        self._tell = tell
        self._pending = plan.for_server(server, fabric) + plan.for_coordinator
        self._started_s: float | None = None

    @property
    def armed(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._pending) and self._started_s is not None

    def start(self, now: float) -> None:
        """The first view is in force: times of the plan count from here."""
        if self._started_s is None:
            self._started_s = now

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, `poll` is due."""
        if self._started_s is None:
            return now + 3600
        times = [self._started_s + f.trigger.t_s for f in self._pending if isinstance(f.trigger, AtTime)]
        return min(times, default=now + 3600)

    def poll(self, core: ServerCore, now: float) -> Iterator[ev.Event]:
        """Suffer what is due now; yields what the core must learn of it, which is little."""
        assert self._started_s is not None
        firings, self._pending = due(self._pending, core.step, core.progress or 0.0, now - self._started_s)
        for firing in firings:
            yield from self._suffer(firing.fault, core)

    def _suffer(self, fault: Fault, core: ServerCore) -> Iterator[ev.Event]:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "freeze":
            _freeze(fault.duration_s)
        elif fault.kind == "coordinator":
            if core.view is not None and self._server == core.view.members[0]:
                self._tell(msg.Inject(str(fault)))
        else:
            assert fault.level is not None
            self._transport.silence(fault.level)
            if fault.kind == "cut":  # unlike a black hole, the end of a cable notices
                yield ev.OwnNicLost(fault.level, f"NIC {self._server}/{fault.level} has no carrier")


def _freeze(duration_s: float | None) -> None:
    """Stop this process; somebody else must wake it, so a shell is left behind to do that."""
    if duration_s is not None:
        command = ["sh", "-c", f"sleep {duration_s}; kill -CONT {os.getpid()}"]
        subprocess.Popen(command, start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
