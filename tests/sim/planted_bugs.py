"""Bugs that are put into the protocol on purpose, to see that the simulation finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from bml.faults import Diagnosis, diagnose
from bml.faults.slowness import slowed
from bml.faults.stalls import Stalls
from bml.protocol.coordinator import ballot, next_view
from bml.protocol.coordinator import core as coord
from bml.protocol.coordinator.agreement import Agreement
from bml.protocol.coordinator.election import CoordinatorElection
from bml.protocol.coordinator.ending import Ending
from bml.protocol.coordinator.evidence import Findings
from bml.protocol.coordinator.succession import Succession
from bml.protocol.server.core import ServerCore
from bml.protocol.server.learner import Learner
from bml.protocol.server.member import Member
from bml.protocol.server.steps import StepMachine
from bml.protocol.server.transfer import IncomingState
from bml.protocol.step.barrier import Barrier
from bml.protocol.step.dataflow import Buffer, Reduce
from bml.protocol.step.workspace import Workspace
from bml.schedule.select.model import DEFAULTS, Constants
from bml.sim.server import machine, user
from bml.sim.server.user import User
from bml.sim.world.launcher import Launcher
from bml.sim.world.settings import TREES
from bml.topology import Fabric, Link, ServerFailure

Patch = pytest.MonkeyPatch


def skip_the_fence(patch: Patch) -> None:
    """Frames of older epochs are taken for those of now."""
    admit, received = ServerCore.admit, ServerCore.received

    def renewed(core: ServerCore, header: Any) -> Any:
        return header._replace(epoch=core.epoch) if header.epoch < core.epoch else header

    patch.setattr(ServerCore, "admit", lambda core, peer, header: admit(core, peer, renewed(core, header)))
    patch.setattr(
        ServerCore,
        "received",
        lambda core, peer, header, text, now: received(core, peer, renewed(core, header), text, now),
    )


def work_on_while_frozen(patch: Patch) -> None:
    """A server that has reported still takes frames and sends tokens of the old epoch."""
    admit, received = ServerCore.admit, ServerCore.received

    def thawed(core: ServerCore, call: Callable[[], Any]) -> Any:
        frozen, core._member.frozen = core._member.frozen, False
        try:
            return call()
        finally:
            core._member.frozen = frozen

    patch.setattr(ServerCore, "admit", lambda core, *a: thawed(core, lambda: admit(core, *a)))
    patch.setattr(ServerCore, "received", lambda core, *a: thawed(core, lambda: received(core, *a)))


def return_before_the_barrier(patch: Patch) -> None:
    """A server that is complete commits without waiting for the others' tokens."""
    patch.setattr(Barrier, "passed", property(lambda barrier: barrier._entered))


def retry_although_one_committed(patch: Patch) -> None:
    """The decision looks at the slowest server alone."""
    patch.setattr(ballot, "decide", lambda statuses, old: min(status.committed for status in statuses))


def forget_accepted_views(patch: Patch) -> None:
    """The decision looks at installed views, not at accepted ones that may be in force elsewhere."""
    decide = ballot.decide

    def forgetful(statuses: Any, old: Any) -> int:
        known = list(statuses)
        installed = [status.installed for status in known if status.installed]
        return max(status.committed for status in known) if installed else decide(known, old)

    patch.setattr(ballot, "decide", forgetful)


def count_a_gradient_twice(patch: Patch) -> None:
    """A lost server's share is computed again by two of the survivors."""
    assignment = user.assignment

    def doubled(indices: Any, base: Any, members: Any) -> Any:
        found = assignment(indices, base, members)
        extras = [part.extra for part in found.values() if len(part.extra)]
        if not extras:
            return found
        last = max(found)
        both = np.concatenate([found[last].extra, extras[0][:1]])
        return {**found, last: found[last]._replace(extra=both)}

    patch.setattr(user, "assignment", doubled)


def add_into_the_contribution(patch: Patch) -> None:
    """Partial sums are built up in the user's own vector: a second try counts them twice."""

    def reduce(workspace: Workspace, instruction: Reduce) -> None:
        size = instruction.stop - instruction.start
        parts = [workspace._arrays[p.buffer][p.offset : p.offset + size] for p in instruction.terms]
        own = workspace._arrays[Buffer.IN][instruction.start : instruction.stop]
        own[...] = sum(parts[1:], start=parts[0])
        workspace._arrays[Buffer.OUT][instruction.start : instruction.stop] = own

    patch.setattr(Workspace, "reduce", reduce)


def takeover_with_a_stale_epoch(patch: Patch) -> None:
    """A new coordinator counts epochs from the beginning; servers do not mind."""
    learn = coord.Coordinator._learn

    def forgetful(self: Any, status: Any, now: float) -> bool:
        epoch = self._known.epoch
        learn(self, status, now)
        self._known.epoch = epoch
        return False

    patch.setattr(coord.Coordinator, "_learn", forgetful)
    _promise_anything(patch)


def takeover_with_the_epoch_in_force(patch: Patch) -> None:
    """A new coordinator goes on from the views in force, not from those that were only accepted."""
    learn = coord.Coordinator._learn

    def stale(self: Any, status: Any, now: float) -> bool:
        epoch = status.installed.epoch if status.installed else 0
        stands = structs.replace(status, promised=epoch, accepted=status.installed)
        return learn(self, stands, now)

    patch.setattr(coord.Coordinator, "_learn", stale)
    _promise_anything(patch)


def _promise_anything(patch: Patch) -> None:
    def freeze(member: Member, message: Any) -> None:
        member.promised = (message.epoch, message.term)
        member.frozen = True

    patch.setattr(Member, "freeze", freeze)


def lose_the_end(patch: Patch) -> None:
    """A coordinator ignores the ends of training functions while it changes the view."""
    ended = coord.Coordinator._ended

    def deaf(self: Any, server: int, outcome: str, error: str, now: float) -> Any:
        return ended(self, server, outcome, error, now) if self.state == "steady" else []

    patch.setattr(coord.Coordinator, "_ended", deaf)


def keep_a_return_secret(patch: Patch) -> None:
    """No server is told that a training function returned: the others wait in a step without it."""
    patch.setattr(Ending, "tell_returned", lambda self, servers, contributors: [])


def lose_a_slice_of_the_state(patch: Patch) -> None:
    """A joiner starts when every donor has announced its part, and does not look whether all of it came."""
    patch.setattr(IncomingState, "complete", property(lambda state: 0 < state._parts == len(state._digests)))
    patch.setattr(user, "verify", lambda state, digests: None)


def let_a_joiner_forget_its_promises(patch: Patch) -> None:
    """A server that was started again answers for the incarnation before."""
    patch.setattr(coord.Coordinator, "_is_known", lambda self, status: True)


def start_from_a_state_that_overtook(patch: Patch) -> None:
    """A joiner goes on from a state although it has not committed the step of that boundary itself."""
    state = Learner.state
    patch.setattr(Learner, "state", lambda learner, committed: state(learner, max(committed, 1 << 40)))


def promote_a_user_that_replays(patch: Patch) -> None:
    """A learner does not say that its user replays: it is to contribute to a step that it waits for."""
    patch.setattr(Learner, "late", property(lambda learner: learner.follows and learner.behind))


def begin_to_replay_while_frozen(patch: Patch) -> None:
    """The user of a learner replays an iteration although the next view may have it as a contributor."""
    arrived = Learner.arrived
    patch.setattr(Learner, "arrived", lambda learner, step, done, frozen: arrived(learner, step, done, False))


def sleep_while_a_state_is_overtaken(patch: Patch) -> None:
    """A joiner that falls behind before its user wakes waits for the state that was here."""

    def wake(self: User) -> None:
        self._wakes = False
        if self._here is not None and not self.over:
            self._take()

    patch.setattr(User, "_wake", wake)


def take_a_joiner_for_a_stranger(patch: Patch) -> None:
    """A new coordinator does not wait for the Status of a server to know of which view it speaks."""

    def handle(core: coord.Coordinator, event: coord.Event, now: float) -> list[coord.Instruction]:
        core._early.clear()
        return original(core, event, now)

    original = coord.Coordinator.handle
    patch.setattr(coord.Coordinator, "handle", handle)


def blame_the_suspected(patch: Patch) -> None:
    """A server that any other suspects, over whatever NIC, is taken for dead."""

    def hasty(fabric: Any, evidence: Any) -> Diagnosis:
        found = diagnose(fabric, evidence)
        accused = {ServerFailure(each.peer) for each in evidence.suspicions if each.peer != each.observer}
        return Diagnosis((*found.failures, *sorted(accused - {*found.failures})), "they are suspected")

    patch.setattr(next_view, "diagnose", hasty)


def read_terms_from_a_clock(patch: Patch) -> None:
    """Terms are the time of day, and a coordinator that was deposed is not replaced."""
    launch, ended = Launcher._launch, Succession.ended

    def by_the_clock(launcher: Launcher, term: int) -> None:
        launcher.succession.term = launcher.clock_ns
        launch(launcher, launcher.succession.term)

    def unless_deposed(self: Succession, term: int, why: str, now: float, done: bool = False) -> None:
        ended(self, term, why, now, done or "deposed" in why)

    patch.setattr(Launcher, "_launch", by_the_clock)
    patch.setattr(Succession, "ended", unless_deposed)


def never_miss_a_coordinator(patch: Patch) -> None:
    """A coordinator that has lived once is replaced only if its process ends, not if it is stopped."""
    heartbeat = Succession.heartbeat

    def trusted(self: Succession, term: int, now: float) -> None:
        heartbeat(self, term, now)
        self._detector.set_links((), now)

    patch.setattr(Succession, "heartbeat", trusted)


def share_terms(patch: Patch) -> None:
    """A rank takes the next term, whichever rank it is."""
    patch.setattr(CoordinatorElection, "_next_term", lambda election: election._term + 1)


def trust_an_open_line(patch: Patch) -> None:
    """A coordinator is there as long as its line is open, whether it answers or not."""
    patch.setattr(CoordinatorElection, "_answers_nothing", lambda election, seen, now: False)


def hear_no_silence(patch: Patch) -> None:
    """A coordinator is replaced only when its line is lost."""
    trust_an_open_line(patch)
    patch.setattr(CoordinatorElection, "_falls_silent", lambda election, seen, now: False)


def forget_earlier_terms(patch: Patch) -> None:
    """A coordinator begins with the least term of its rank, once more."""
    patch.setattr(CoordinatorElection, "_next_term", lambda election: election._rank + 1)


def ignore_stalls(patch: Patch) -> None:
    """A connection that stands still while heartbeats pass is ignored."""
    patch.setattr(Stalls, "standing", lambda stalls, now: {})


def give_up_the_busy(patch: Patch) -> None:
    """A server that does not answer in time is taken for dead, although all hear its heartbeats."""

    def overdue(self: Agreement, now: float) -> dict[int, str]:
        late = self.awaited if self._waits and now >= self.answer_by else []
        return dict.fromkeys(late, "no answer")

    patch.setattr(Agreement, "overdue", overdue)


def take_a_torn_sum(patch: Patch) -> None:
    """Shared memory: a step that a view commits is given out, even if its shares may be overwritten."""
    patch.setattr(StepMachine, "_commit_by_view", lambda steps, step, now: steps._commit(step, now))


def leave_without_a_word(patch: Patch) -> None:
    """Shared memory: no server can see that another has left an epoch, before it is ready in a later one."""
    patch.setattr(StepMachine, "_quit", lambda steps, epoch: ())


def keep_without_bound(patch: Patch) -> None:
    """A joiner keeps results for as long as its user takes to come to them."""
    init = Learner.__init__
    patch.setattr(Learner, "__init__", lambda learner, server, most_nbytes=0: init(learner, server))


def read_constants_of_its_own(patch: Patch) -> None:
    """On a damaged fabric one server chooses its schedules by other constants than the others."""
    programs = machine._programs

    def by_its_own(fabric: Fabric, algorithm: str, constants: Constants, server: int) -> Any:
        if fabric.failures and server == max(fabric.servers):
            constants = DEFAULTS if constants == TREES else TREES
        return programs(fabric, algorithm, constants, server)

    patch.setattr(machine, "_programs", by_its_own)


def plan_with_old_rates(patch: Patch) -> None:
    """Every third plan is for the rates of the first view."""
    plans: list[Fabric] = []

    def old(fabric: Fabric, halvings: Mapping[Link, int]) -> Fabric:
        plans.append(fabric)
        return slowed(fabric, halvings if len(plans) % 3 else {})

    patch.setattr("bml.protocol.server.core.slowed", old)


def judge_by_one_round(patch: Patch) -> None:
    """A NIC is slow that moves less than others in one round, whoever else waits for it."""
    patch.setattr("bml.protocol.coordinator.rates.ROUNDS", 1)
    patch.setattr("bml.faults.slowness.LONGER", 0.0)
    patch.setattr("bml.faults.slowness.LONGEST", 0.0)
    patch.setattr("bml.faults.slowness.SLOW_SHARE", 0.8)


def give_up_a_server_that_is_held(patch: Patch) -> None:
    """Its stand-in says that it lives, and it is awaited no longer for that."""
    patch.setattr(Findings, "is_held", lambda self, server, now: False)


def give_up_whom_nobody_can_hear(patch: Patch) -> None:
    """A server that does not answer is lost soon, though nobody suspects it: others may be silent, too."""

    def await_(self: Agreement, now: float, for_s: float) -> None:
        right(self, now, for_s)
        self.last_answer_by = self._latest_by

    right = Agreement._await
    patch.setattr(Agreement, "_await", await_)


PLANTED: tuple[Callable[[Patch], None], ...] = (
    skip_the_fence,
    work_on_while_frozen,
    return_before_the_barrier,
    retry_although_one_committed,
    forget_accepted_views,
    count_a_gradient_twice,
    add_into_the_contribution,
    takeover_with_a_stale_epoch,
    takeover_with_the_epoch_in_force,
    lose_the_end,
    keep_a_return_secret,
    lose_a_slice_of_the_state,
    let_a_joiner_forget_its_promises,
    start_from_a_state_that_overtook,
    keep_without_bound,
    promote_a_user_that_replays,
    begin_to_replay_while_frozen,
    sleep_while_a_state_is_overtaken,
    take_a_joiner_for_a_stranger,
    blame_the_suspected,
    read_terms_from_a_clock,
    never_miss_a_coordinator,
    share_terms,
    trust_an_open_line,
    hear_no_silence,
    forget_earlier_terms,
    ignore_stalls,
    give_up_the_busy,
    read_constants_of_its_own,
    plan_with_old_rates,
    judge_by_one_round,
    give_up_whom_nobody_can_hear,
)

PLANTED_IN_SHARED_MEMORY: tuple[Callable[[Patch], None], ...] = (take_a_torn_sum, leave_without_a_word)
