"""Applies the faults of a plan on one server when they are due: by its own act, or by asking another process.

Faults of cables are applied to real cables where there are any: the server asks the launcher, which holds
those of the emulated fabric, and waits until the fault is in force, so that it strikes in its step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Protocol, assert_never

from bml.cluster.injection.acts import COORDINATOR_ACTS, SERVER_ACTS
from bml.cluster.injection.actuators import Actuators
from bml.faults import AtOnce, AtPhase, AtStep, AtTime, Fault, FaultPlan, Moment, due
from bml.faults.kinds import KINDS, Harness
from bml.faults.notation import TRANSFER
from bml.faults.plan import acts, touches
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind
from bml.topology import Fabric

_FOREVER_S = 3600.0  # nothing is due, so another event comes first


class Core(Protocol):
    """The state of the core that injection reads (see ServerCore)."""

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


class Injection:
    """The faults that are still to come on one server (`pending`); steps are the session's, from 1.

    `was_there`: the job began with a server of this number. If this one joins, it takes that one's place.
    """

    def __init__(self, plan: FaultPlan, fabric: Fabric, actuators: Actuators, was_there: bool = False):
        server = self._server = actuators.server
        self._fabric = fabric
        self._actuators = actuators
        self._was_there = was_there
        self.pending = plan.for_server(server, fabric) + plan.for_anybody
        self.struck: list[str] = []
        """Those whose time has come, as texts."""
        self._standing: tuple[Fault, ...] = ()
        """What slows connections down since before this server joined, and is to do so again."""
        self._started_s: float | None = None
        self._results_of = 0
        self._left: list[tuple[Fault, int, int]] = []
        """Faults that the lowest live server was to ask for: (fault, that server, its step at that time)."""
        self.armed = bool(self.pending)
        """Whether `poll` is to be called: something is still to come, or to be taken over."""

    def start(self, now: float, joined_after: int | None) -> None:
        """A view is in force: times of the plan count from the first.

        `joined_after`: this server joined after that step, None: it was there from the beginning. What was to
        strike before is over, but for a slow cable that stays slow: its connections are slow again. So is
        what was to strike in the step under way, if this server had a predecessor, which may have died of it.
        """
        if self._started_s is not None:
            return
        self._started_s = now
        if joined_after is not None:
            over = joined_after + self._was_there
            self._standing = tuple(fault for fault in self.pending if self._stands(fault, over))
            self.pending = tuple(fault for fault in self.pending if _comes(fault, over))
            self.armed = bool(self.pending or self._standing)

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
        standing, self._standing = self._standing, ()
        for fault in standing:
            self._apply_fault(fault, core)
        firings, self.pending = due(self.pending, moment)
        for firing in firings:
            self.struck.append(str(firing.fault))
            self._apply_fault(firing.fault, core)
        if self._left:
            self._take_over(core)
        self.armed = bool(self.pending or self._left)

    def add(self, text: str, core: Core, now: float) -> str:
        """Take a fault for a running job; returns what this server is going to do, "" if nothing.

        It strikes when `poll` is called next, unless it has a moment of its own. Raises UsageError if `text`
        is no fault of this fabric.
        """
        fault = Fault.parse(text, at_once=True)
        FaultPlan((fault,)).validate(self._fabric)
        concerned = acts(fault, self._server, self._fabric) or fault.by_anybody
        if not concerned or not self._acts(fault, core):
            return ""
        if isinstance(fault.trigger, AtTime) and self._started_s is not None:
            fault = replace(fault, trigger=AtTime(now - self._started_s + fault.trigger.t_s))
        self.pending = (*self.pending, fault)
        self.armed = True
        when = "" if isinstance(fault.trigger, AtOnce) else f" ({Fault.parse(text, at_once=True).trigger})"
        return f"server {self._server} (process {os.getpid()}) {self._does(fault)}{when}"

    def _stands(self, fault: Fault, step: int) -> bool:
        """Return True for a slow cable that was so in this step, and is so to the end of the job."""
        if not KINDS[fault.kind].both_ends or fault.duration_s is not None:
            return False
        is_over = isinstance(fault.trigger, AtStep) and fault.trigger.step <= step
        return is_over and self._harness(fault) == "server"

    def _harness(self, fault: Fault) -> Harness:
        """Return the harness that applies the fault in this job."""
        if fault.by_anybody:
            return "coordinator"
        on_fabric = self._actuators.apply_to_fabric is not None and "fabric" in KINDS[fault.kind].on
        return "fabric" if on_fabric else "server"

    def _does(self, fault: Fault) -> str:
        """Say in words what this server does to apply it."""
        match self._harness(fault):
            case "coordinator":
                return COORDINATOR_ACTS[fault.kind].does
            case "fabric":
                part = "machine" if fault.level is None else "cables"
                return f"has it done to the {part} of {fault.target}"
            case "server":
                nic = "" if fault.level is None else f", {self._server}/{fault.level}"
                return SERVER_ACTS[fault.kind].does + nic
            case never:
                assert_never(never)

    def _acts(self, fault: Fault, core: Core) -> bool:
        """Return True if, of the servers that a fault concerns, this one is to act."""
        members = core.view.contributors if core.view is not None else self._fabric.servers
        match self._harness(fault):
            case "coordinator":
                return self._server == members[0]
            case "fabric":
                concerned = [server for server in members if touches(fault, server, self._fabric)]
                return fault.level is None or self._server in concerned[:1]
            case "server":
                return True  # its own process, its own NIC, or its end of the connection
            case never:
                assert_never(never)

    def _take_over(self, core: Core) -> None:
        """Apply the faults that were left to a server that was lost in that very step.

        It may have died before it applied them. All servers may be complete, and the step committed, although
        that server died in it.
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
        match self._harness(fault):
            case "coordinator":
                self._actuators.tell(msg.Inject(str(fault)))
            case "fabric":
                assert self._actuators.apply_to_fabric is not None
                self._actuators.apply_to_fabric(fault)
            case "server":
                SERVER_ACTS[fault.kind].apply(fault, self._actuators)
            case never:
                assert_never(never)


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
