"""All servers of one job in one process: a model of the runtime's promises to training functions.

A step is committed when all contributors have brought their contribution, which is read then and not before,
as memory that is sent without a copy is. Servers die and leave at moments that the program's faults name; the
others are told to prepare their contribution anew. Servers that join get the state at the first boundary that
all others still have before them, follow, and contribute from the step on that they have caught up with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from bml.errors import BmlError, StepMismatch, TooFewServers, TrainingError
from bml.protocol.server.transfer import SegmentedBytes
from bml.protocol.step.workspace import OPS, Array
from bml.protocol.wire.messages import View
from bml.sim.programs.faults import Faults, Hang
from bml.train.communicator import Committed

DEADLINE_S = 20.0
"""The longest wait that is no hang, in seconds: everything else takes milliseconds."""


class Contribution(NamedTuple):
    """The contribution of a server to a step: a vector, the operation, and the call in words."""

    vector: Array
    op: str
    text: str
    signature: int
    shared: bool


class StateRequest:
    """A joiner's request for the training state, and the state that was sent for it."""

    def __init__(self, server: int):
        self.server = server
        self.from_step = 0
        """The first step whose boundary counts: every contributor still comes to it."""
        self.state: tuple[int, bytes] | None = None
        self.sent_by: set[int] = set()
        self.sent_in = 0
        """The epoch in which the state was sent first."""
        self.in_vain = False
        """Whether no contributor is left that could send it."""


class AllDead(BmlError):
    """Every server of the job has died, so none of them does anything any more."""


class Group:
    """All servers of one job. `start(server)`, called in no particular thread, starts one that is to join."""

    def __init__(
        self, servers: Iterable[int], faults: Faults, start: Callable[[int], None], job: str = "job"
    ):
        self.job = job
        self.servers = tuple(servers)
        self.faults = faults
        self.error: BmlError | None = None
        self.violations: list[str] = []
        self.changed = threading.Condition()
        self.committed = 0
        self.epoch = 1
        self.contributors = tuple(each for each in self.servers if each not in faults.absent)
        self._start = start
        self.deadline_s = DEADLINE_S
        self._results: dict[int, Committed] = {}
        self.called: dict[int, Contribution] = {}
        """The first contributor's call in each step."""
        self.shares: dict[int, dict[str, Any] | None] = {}
        """How batches are shared since a step, as the first server said."""
        self._brought: dict[int, Contribution] = {}
        self._ended: set[int] = set()
        self._to_join = sorted(faults.joins)
        self._requests: dict[int, StateRequest] = {}
        self._alive = set(self.contributors)
        self._has_not_asked: set[int] = set()
        self.n_faults = 0
        """How many servers died, left or joined."""

    @property
    def view(self) -> View:
        """The view in force; servers that have asked for the state are its learners."""
        learners = tuple(sorted(self._requests))
        members = tuple(sorted((*self.contributors, *learners)))
        return View(self.epoch, members, (), self.committed, "by seed", 0.0, learners=learners)

    @property
    def over(self) -> bool:
        """Whether no step will be committed any more, as all contributors have ended."""
        return self._ended.issuperset(self.contributors)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, holding `changed`; raises the error that ended the job, or Hang."""
        if not self.changed.wait_for(lambda: condition() or self.error is not None, self.deadline_s):
            self.violations.append(f"hang: {what}")
            self.fail(BmlError("hang"))
            raise Hang(what)
        if self.error is not None and not condition():
            raise self.error

    def let_pass(self, n_steps: int, most_s: float) -> None:
        """Return when so many steps more are committed, or the time is over."""
        with self.changed:
            until = self.committed + n_steps
            self.changed.wait_for(lambda: self.committed >= until or self.error is not None, most_s)

    def kill_all(self) -> None:
        """All servers die now; any thread may call it."""
        with self.changed:
            self.fail(AllDead("all servers have died"))

    def fail(self, error: BmlError) -> None:
        """End the job."""
        self.error = self.error or error
        self.changed.notify_all()

    # --- steps -----------------------------------------------------------------------------------

    def bring(self, server: int, brought: Contribution) -> None:
        """A contribution to the next step; the last one commits it."""
        self._brought[server] = brought
        self._commit_if_whole()

    def _commit_if_whole(self) -> None:
        if self.error is not None or not self.contributors or not self._brought:
            return
        gone = sorted(self._ended.intersection(self.contributors))
        if gone:
            text = next(iter(self._brought.values())).text
            self.fail(StepMismatch(f"server {gone[0]} has ended, others call {text}"))
        elif set(self.contributors) <= set(self._brought):
            self._commit()

    def _commit(self) -> None:
        calls = [self._brought[server] for server in self.contributors]
        if len({(call.signature, call.op, call.vector.dtype, call.vector.size) for call in calls}) > 1:
            self.fail(StepMismatch(" but ".join(sorted({call.text for call in calls}))))
            return
        reduce = OPS[calls[0].op]
        total = calls[0].vector.copy()
        with np.errstate(all="ignore"):
            for call in calls[1:]:
                reduce(total, call.vector, out=total)
        self.committed += 1
        self.called[self.committed] = calls[0]
        self._results[self.committed] = Committed(self.committed, self.epoch, self.contributors, total)
        self._brought.clear()
        if self.committed == self.faults.ends_after:
            self.fail(AllDead("all servers have died"))
        while self._to_join and self._to_join[0][0] <= self.committed:
            self._begin_joining(self._to_join.pop(0)[1])
        self.changed.notify_all()

    def _begin_joining(self, server: int) -> None:
        if server not in self.contributors and server not in self._alive:
            self._alive.add(server)
            self._has_not_asked.add(server)
            self.n_faults += 1
            self._start(server)

    def result(self, step: int, shared: bool) -> Committed:
        """The result for one server: in memory of its own, or, if `shared`, read-only."""
        found = self._results[step]
        total = found.result.copy()
        total.flags.writeable = not shared
        return Committed(found.step, found.epoch, found.contributors, total)

    # --- membership ------------------------------------------------------------------------------

    def lose(self, server: int) -> None:
        """A server has died, or left: the others prepare anew."""
        self.n_faults += 1
        self._forget(server)
        if server in self.contributors:
            self._change(tuple(each for each in self.contributors if each != server))
        self.changed.notify_all()

    def _forget(self, server: int) -> None:
        self._alive.discard(server)
        self._has_not_asked.discard(server)
        self._requests.pop(server, None)

    def promote(self, server: int) -> None:
        """A joiner contributes from the next step on."""
        self._requests.pop(server, None)
        self._change(tuple(sorted((*self.contributors, server))))

    def _change(self, contributors: tuple[int, ...]) -> None:
        self.contributors = contributors
        self.epoch += 1
        self._brought.clear()
        for request in self._requests.values():  # another transfer begins
            if request.state is None:
                request.from_step = self.committed + 1
        if not contributors:
            self.fail(TooFewServers("no server is left"))
        if self.over:
            for request in self._requests.values():
                request.in_vain = True
        self.changed.notify_all()

    def end(self, server: int, error: BaseException | None) -> None:
        """A training function has ended; that of a joiner without contributions does not end the job."""
        with self.changed:
            self._forget(server)
            if server in self.contributors:
                if error is not None:
                    text = f"server {server} raised {type(error).__name__}: {error}"
                    self.fail(error if isinstance(error, BmlError) else TrainingError(text, server))
                self._ended.add(server)
                self._commit_if_whole()
                if self.over:
                    for request in self._requests.values():
                        request.in_vain = True
            self.changed.notify_all()

    # --- the state -------------------------------------------------------------------------------

    def ask(self, request: StateRequest) -> None:
        """A joiner wants the state: that of the first boundary which no contributor has passed."""
        request.from_step = self.committed + 1
        self._requests[request.server] = request
        self._has_not_asked.discard(request.server)
        if self.over:
            request.in_vain = True
        self.changed.notify_all()

    def hold(self) -> None:
        """A server is at a boundary, or begins a step: it waits for joiners, if the faults say so."""
        if self.faults.holds_for_joiners:
            self.wait_for(lambda: not self._has_not_asked, "servers that were started to join")

    def send_state(self, server: int, step: int, state: Callable[[], SegmentedBytes]) -> None:
        """A contributor is at the boundary after this step: all must send the same state there."""
        for request in list(self._requests.values()):
            if step < request.from_step or server in request.sent_by:
                continue
            request.sent_by.add(server)
            pieces = state()
            found = bytes(pieces[0 : len(pieces)])
            if request.state is None:
                request.state, request.sent_in = (step, found), self.epoch
                self.changed.notify_all()
            elif (request.sent_in, request.state[0]) == (self.epoch, step) and request.state[1] != found:
                self.violations.append(f"server {server} sends another state after step {step} than others")
