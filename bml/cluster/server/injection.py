"""Carries out, on this server itself, the faults that a plan has for it: real signals, real silence.

Faults of cables are done to the cables where there are real ones: the server asks whoever holds them (the
launcher, on the emulated fabric) and waits until it is done, so that the fault strikes in its step.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from bml.cluster.server.freezing import stop_this_process
from bml.faults import AtOnce, AtPhase, AtStep, AtTime, Fault, FaultPlan, Moment, due
from bml.faults.holds import Holds
from bml.faults.notation import TRANSFER
from bml.faults.plan import touches
from bml.io.poller import Poller
from bml.protocol.server import events as ev
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind
from bml.topology import Fabric, InvariantError, LinkFailure
from bml.transport.interface import Transport

EXIT_STATUS = 70
"""Status of a process that a fault `exit` ended."""

_FOREVER_S = 3600.0
_DEEDS = {
    "kill": "sends SIGKILL to its process",
    "node": "has every process of its machine killed",
    "freeze": "sends SIGSTOP to its process",
    "exit": f"ends its process with status {EXIT_STATUS}",
    "exception": "raises in its training function",
    "gil": "holds its interpreter's lock in a call of C",
    "coordinator": "has the coordinator killed",
    "leave": "leaves before its next step",
    "join": "has it started, to join",
    "cut": "silences the NIC and notices it",
    "blackhole": "silences the NIC",
    "stall": "stops what its connection carries, not its heartbeats,",
    "switch": "silences the NIC",
    "flap": "silences the NIC again and again",
}


class InjectedError(RuntimeError):
    """What the fault `exception` raises in a training function."""


class Core(Protocol):
    """What injection looks at (see ServerCore)."""

    @property
    def step(self) -> int:
        """See ServerCore."""
        ...

    @property
    def phase(self) -> str:
        """See ServerCore."""
        ...

    @property
    def view(self) -> msg.View | None:
        """See ServerCore."""
        ...

    @property
    def progress(self) -> float | None:
        """See ServerCore."""
        ...


@dataclass(frozen=True)
class Actuators:
    """The means by which a fault takes effect on the server that it strikes."""

    transport: Transport
    poller: Poller
    tell: Callable[[msg.ToCoordinator], None]
    """Say something to the coordinator."""
    throw: Callable[[Exception], None]
    """Raise in the training function."""
    dispatch: Callable[[ev.Event], None]
    """Bring an event to the core."""
    leave: Callable[[str], None]
    """Ask this server to go."""
    apply_to_fabric: Callable[[Fault], None] | None = None
    """Have it done to real cables, and wait for it; None where there are none."""


class Injection:
    """The faults that are still to come on `server`, which are `pending`; steps are the session's, from 1."""

    def __init__(self, server: int, plan: FaultPlan, fabric: Fabric, actuators: Actuators):
        self._server = server
        self._fabric = fabric
        self._actuators = actuators
        self.pending = plan.for_server(server, fabric) + plan.for_anybody
        self.struck: list[str] = []
        """Those whose time has come, as texts."""
        self._started_s: float | None = None
        self._results_of = 0
        self._holds = Holds()
        self._left: list[tuple[Fault, int, int]] = []
        """What the lowest live server was to have done: that server, and the step of then."""
        self.armed = bool(self.pending)
        """Whether `poll` is to be called: something is still to come, or to be taken over."""

    def start(self, now: float, joined_after: int | None) -> None:
        """A view is in force: times of the plan count from the first.

        `joined_after`: this server joined after that step, None: it was there from the beginning. What was to
        strike before is over.
        """
        if self._started_s is not None:
            return
        self._started_s = now
        if joined_after is not None:
            self.pending = tuple(fault for fault in self.pending if _comes(fault, joined_after))
            self.armed = bool(self.pending)

    def saw(self, header: Header) -> None:
        """A frame arrived or is sent: results of a step mean that its broadcast is under way.

        An exchange, which small steps take, has no results: after `reduce` comes `complete`.
        """
        if header.kind == Kind.BROADCAST:
            self._results_of = max(self._results_of, header.step)

    def phase(self, core: Core) -> str:
        """Phase of the step, or of the job, that this server is in."""
        return "broadcast" if core.phase == "reduce" and self._results_of == core.step else core.phase

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, `poll` is due."""
        if self._started_s is None:
            return now + _FOREVER_S
        times = [self._started_s + f.trigger.t_s for f in self.pending if isinstance(f.trigger, AtTime)]
        return min(times, default=now + _FOREVER_S)

    def poll(self, core: Core, now: float) -> None:
        """Apply the faults that are due now."""
        self._poll(core, Moment(core.step, core.progress or 0.0, self.phase(core), self._since_s(now)))

    def before_token(self, step: int, core: Core, now: float) -> None:
        """Apply the faults that are due when all outputs of `step` are final, before its first token leaves.

        The core may be past it already: what it did is done when its instructions are carried out.
        """
        self._poll(core, Moment(step, 1.0, "complete", self._since_s(now)))

    def before_state(self, core: Core, now: float) -> None:
        """Apply the faults that are due when a joiner's state is about to leave."""
        self._poll(core, Moment(core.step, 0.0, TRANSFER, self._since_s(now)))

    def _since_s(self, now: float) -> float | None:
        return None if self._started_s is None else now - self._started_s

    def _poll(self, core: Core, moment: Moment) -> None:
        firings, self.pending = due(self.pending, moment)
        for firing in firings:
            self.struck.append(str(firing.fault))
            self._apply_fault(firing.fault, core)
        if self._left:
            self._take_over(core)
        self.armed = bool(self.pending or self._left)

    def add(self, text: str, core: Core, now: float) -> str:
        """Take a fault for a running job; returns what this server is going to do, "" if nothing.

        It strikes when `poll` is called next, unless it says when. Raises UsageError if it cannot be.
        """
        fault = Fault.parse(text, at_once=True)
        FaultPlan((fault,)).validate(self._fabric)
        concerned = touches(fault, self._server, self._fabric) or fault.by_anybody
        if not concerned or not self._acts(fault, core):
            return ""
        if isinstance(fault.trigger, AtTime) and self._started_s is not None:
            fault = replace(fault, trigger=AtTime(now - self._started_s + fault.trigger.t_s))
        self.pending = (*self.pending, fault)
        self.armed = True
        when = "" if isinstance(fault.trigger, AtOnce) else f" ({Fault.parse(text, at_once=True).trigger})"
        return f"server {self._server} (process {os.getpid()}) {self._deed(fault)}{when}"

    def _deed(self, fault: Fault) -> str:
        if fault.of_coordinator and fault.kind == "freeze":
            return "has the coordinator stopped"
        if fault.level is None:
            return _DEEDS[fault.kind]
        if self._actuators.apply_to_fabric is not None and fault.kind != "stall":
            return f"has it done to the cables of {fault.target}"
        return f"{_DEEDS[fault.kind]}, {self._server}/{fault.level}"

    def _acts(self, fault: Fault, core: Core) -> bool:
        """Whether it is this server that acts, of those that a fault concerns."""
        if fault.level is None and not fault.by_anybody:
            return True
        members = core.view.contributors if core.view is not None else self._fabric.servers
        if fault.by_anybody:
            return self._server == members[0]
        if self._actuators.apply_to_fabric is None or fault.kind == "stall":
            return True  # each silences its own NIC, or its end of the connection
        concerned = [server for server in members if touches(fault, server, self._fabric)]
        return bool(concerned) and concerned[0] == self._server

    def _take_over(self, core: Core) -> None:
        """Have done what was left to a server that was lost in that very step: it may not have done it.

        All may be complete, and the step committed, although it died in it.
        """
        if core.view is None:
            return
        members, left, self._left = core.view.contributors, self._left, []
        for fault, actor, step in left:
            if actor in members:
                if core.step <= step + 1:
                    self._left.append((fault, actor, step))
            elif core.view.commit <= step:
                if members[0] == self._server:
                    self._apply_fault(fault, core)
                else:
                    self._left.append((fault, members[0], step))

    def _apply_fault(self, fault: Fault, core: Core) -> None:
        if not self._acts(fault, core):
            if fault.by_anybody and core.view is not None:
                self._left.append((fault, core.view.contributors[0], core.step))
            return
        match fault.kind:
            case _ if fault.by_anybody:
                self._actuators.tell(msg.Inject(str(fault)))
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(EXIT_STATUS)
            case "freeze":
                stop_this_process(fault.duration_s)
            case "exception":
                self._actuators.throw(InjectedError(f"injected by {fault}"))
            case "gil":
                _hold_the_gil(fault.duration_s or 0.0)
            case "leave":
                self._actuators.leave(f"asked to by {fault}")
            case "stall":
                self._stall(fault)
            case "cut" | "blackhole" | "switch" | "flap" | "slow" | "loss" | "node":
                self._break(fault)
            case _:
                raise InvariantError(f"no server knows how to apply the fault {fault}")

    def _stall(self, fault: Fault) -> None:
        """Have this server's own kernel drop what the connection brings: cables know no connections."""
        level, transport = fault.level, self._actuators.transport
        assert isinstance(fault.target, LinkFailure)
        assert level is not None
        assert fault.peer is not None
        peer = fault.peer if fault.target.server == self._server else fault.target.server

        def end() -> None:
            if self._holds.let_go((peer, level)):
                transport.unstall(peer, level)

        if self._holds.take((peer, level)):
            transport.stall(peer, level)
        if fault.duration_s is not None:
            self._actuators.poller.after(fault.duration_s, end)

    def _break(self, fault: Fault) -> None:
        """Break the cables or the machine where there are real ones, else do as if."""
        if self._actuators.apply_to_fabric is not None:
            self._actuators.apply_to_fabric(fault)
        else:
            self._silence(fault)

    # --- NICs without a cable ------------------------------------------------------------------

    def _silence(self, fault: Fault) -> None:
        level, poller = fault.level, self._actuators.poller
        assert level is not None
        if fault.kind == "flap":
            self._flap(fault, None if fault.duration_s is None else poller.now_s() + fault.duration_s)
            return
        self._take(level)
        if fault.duration_s is not None:
            poller.after(fault.duration_s, lambda: self._let_go(level))
        if fault.kind == "cut":  # unlike a black hole, the end of a cable notices
            self._actuators.dispatch(ev.OwnNicLost(level, f"NIC {self._server}/{level} has no carrier"))

    def _flap(self, fault: Fault, until_s: float | None) -> None:
        level, poller = fault.level, self._actuators.poller
        assert level is not None
        if until_s is not None and poller.now_s() >= until_s:
            return
        self._take(level)
        half_s = fault.period_s / 2
        poller.after(half_s, lambda: self._let_go(level))
        poller.after(2 * half_s, lambda: self._flap(fault, until_s))

    def _take(self, level: int) -> None:
        """One more fault strikes the NIC, or the switch that it is on."""
        if self._holds.take(level):
            self._actuators.transport.silence(level)

    def _let_go(self, level: int) -> None:
        if self._holds.let_go(level):
            self._actuators.transport.unsilence(level)


def _comes(fault: Fault, step: int) -> bool:
    match fault.trigger:
        case AtStep(at):
            return at > step
        case AtPhase(phase):
            return phase != "start"
        case AtTime():
            return False  # it counts from a time that a joiner has not seen
        case AtOnce():
            return True


def _hold_the_gil(duration_s: float) -> None:
    """As an extension that computes in C without releasing the lock: no thread of Python runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(duration_s * 1e6))
