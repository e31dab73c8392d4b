"""The coordinator: it gathers evidence and decides views, and holds nothing that the servers do not hold.

`Coordinator.handle` takes every event, and returns instructions to its shell. This module says what each
event and message means. agreement.py has the state table: how the servers are brought to one view.
docs/explanation/protocol.md says why the decision is safe.
"""

from __future__ import annotations

from collections.abc import Iterable

from bml.protocol.coordinator.agreement import Agreement
from bml.protocol.coordinator.decision import epoch_of
from bml.protocol.coordinator.events import (
    Connected,
    Event,
    Finished,
    From,
    Gone,
    Instruction,
    Post,
    Tick,
    Unreached,
)
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import Incarnation, View
from bml.topology import Fabric


class Coordinator:
    """See the module's text.

    `term` grows with every coordinator of a job. `min_servers`: fewer than that stop the job; None:
    a view must have more than half of the members of the one before. `absent` servers are not there from the
    beginning, and may join. `adapts`: the servers' schedules take notice of the rates of NICs.

    A message of a server counts once the server's Status has come over the same connection. Before that, a
    new coordinator does not know the view that the message is about, nor that the server is a member.
    """

    def __init__(
        self,
        fabric: Fabric,
        term: int,
        timeouts: Timeouts,
        min_servers: int | None,
        now: float,
        absent: Iterable[int] = (),
        adapts: bool = True,
    ):
        self.term = term
        self._timeouts = timeouts
        self._agreement = Agreement(fabric, term, timeouts, min_servers, now, absent, adapts)
        self._known, self._findings = self._agreement.known, self._agreement.findings
        self._joiners, self._ending = self._agreement.joiners, self._agreement.ending
        self._early: dict[int, list[msg.ToCoordinator]] = {}  # messages that came before the Status
        self._incarnations: dict[int, Incarnation | None] = {}  # of those that have answered

    @property
    def state(self) -> str:
        """See bml.protocol.coordinator.agreement."""
        return self._agreement.state

    @property
    def step(self) -> int:
        """The last step of which it is known that it is committed."""
        return self._known.committed

    @property
    def view(self) -> View | None:
        """The newest known view: its decision counts."""
        return self._known.view

    @property
    def members(self) -> tuple[int, ...]:
        """Servers of the newest view; before there is one, those that are to be in the first."""
        return self._known.members

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members without the learners."""
        return self._known.contributors

    @property
    def awaited(self) -> list[int]:
        """The servers whose answers are needed to go on."""
        return self._agreement.awaited

    @property
    def waiting(self) -> tuple[int, ...]:
        """Servers that want to join, and are in no view yet."""
        return self._joiners.waiting

    @property
    def suspicions(self) -> list[str]:
        """All suspicions, in words."""
        return self._findings.texts

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, a Tick is due."""
        return self._agreement.next_deadline(now)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """React to an event at time `now` (seconds)."""
        if self.state == "stopped":
            return self._ending.answer_late(event)
        self._agreement.forgive_own_pause(now)
        match event:
            case Connected(server):
                # The server repeats the suspicions that it still has.
                self._findings.forget(lambda each: each.observer == server)
                self._agreement.settle_if_steady()
                self._early[server] = []
                return [Post(server, msg.Who(self.term)), *self._agreement.missed_by(server)]
            case Gone(server, why):
                return self._gone(server, why, now)
            case Unreached(server, why, for_s):
                return self._unreached(server, why, for_s, now)
            case From(server, msg.Ask()):
                return [Post(server, msg.Noted(self.term))]
            case From(server, msg.Status() | msg.Deposed() as message):
                return self._message(server, message, now)
            case From(server, message) if server in self._early:
                self._early[server].append(message)
                return []
            case From(server, message):
                return self._message(server, message, now)
            case Tick():
                return self._tick(now)

    # --- evidence --------------------------------------------------------------------------------

    def _gone(self, server: int, why: str, now: float) -> list[Instruction]:
        self._joiners.drop(server)
        self._early.pop(server, None)
        if self._agreement.ballot is not None and server in self._agreement.ballot.newcomers:
            return self._agreement.change(now)
        if server not in self.members or server in self._findings.gone:
            return []
        return self._lost(server, f"is dead: {why}", now)

    def _unreached(self, server: int, why: str, for_s: float, now: float) -> list[Instruction]:
        """A member whose neighbours hear it is alive: it is called for longer before it counts as gone."""
        if self.view is None:
            return []  # it may still import modules that its training function needs
        for_s = min(for_s, self._agreement.has_run_for_s(now))
        return self._gone(server, why, now) if for_s > self._agreement.called_for_s(server, now) else []

    def _lost(self, server: int, what: str, now: float) -> list[Instruction]:
        """There is proof that a member is gone: `what` is known of it."""
        self._findings.gone[server] = what
        if self.state == "gathering":
            return self._agreement.gathered(now)
        self._findings.note_proof(now)
        return []

    def _suspected(self, message: msg.Suspect, now: float) -> list[Instruction]:
        if self.state == "steady" and self._agreement.excludes(message):
            return []  # it was said in the view before
        away = self.state == "steady" and self._agreement.was_away(now)
        if away and self._findings.doubt(message, now):
            self._agreement.reason = (
                f"the coordinator was stopped, and server {message.observer} suspects others"
            )
            return []
        self._findings.suspect(message)
        if self.state != "gathering" and not self._agreement.excludes(message):
            self._findings.note_suspicion(message, now)
        return []

    def _interrupted(self, message: msg.Interrupted, now: float) -> list[Instruction]:
        """Nothing is broken now but a connection, which a view makes again."""
        if self._agreement.ballot is not None:
            return []  # the view that comes does
        observer, peer, level = message.observer, message.peer, message.level
        self._agreement.reason = f"servers {observer} and {peer} lost their connection on level {level}"
        self._findings.stale.add(observer)
        if self.state == "steady":
            self._findings.note(now, self._timeouts.silence_window_s)
        return []

    def _tick(self, now: float) -> list[Instruction]:
        findings = self._findings
        late = self._overdue(now)
        if late:
            return late
        if findings.act_at is not None and now >= findings.act_at and self.state != "gathering":
            findings.act_at = self._agreement.postponed(now)
            if findings.act_at is not None:
                return []
            return self._agreement.change(now) if findings.fresh else []
        agreement = self._agreement
        return agreement.heal(now) or agreement.admit_or_promote(now) or agreement.adjust(now)

    def _overdue(self, now: float) -> list[Instruction]:
        """Go on without the servers that have not answered in time."""
        late = self._agreement.overdue(now)
        if not late:
            return []
        for server, what in late.items():
            self._joiners.drop(server)
            self._findings.gone[server] = what
        return self._agreement.gathered(now) if self.state == "gathering" else self._agreement.change(now)

    # --- gathering: start-up and takeover --------------------------------------------------------

    def _learn(self, status: msg.Status, now: float) -> bool:
        """Take over the views and promises of other coordinators. Returns whether there was anything new."""
        was_first = self.view is None
        news = self._known.learn(status)
        if was_first and self.view is not None:
            self._agreement.take_over(now)
        return news

    def _status(self, status: msg.Status, now: float) -> list[Instruction]:
        news = self._learn(status, now)
        self._incarnations[status.server] = status.incarnation
        told = [
            each
            for message in self._early.pop(status.server, ())
            for each in self._message(status.server, message, now)
        ]
        if self.state == "stopped":
            return told
        if not self._is_known(status.server):
            return [*told, *self._stranger(status, news, now)]
        if status.outcome:
            told += self._noted(status.server, status.outcome, status.committed)
        return [*told, *self._answer(status, news, now)]

    def _answer(self, status: msg.Status, news: bool, now: float) -> list[Instruction]:
        """React to the Status of a server that is a member, or was one."""
        if self.state == "gathering":
            self._agreement.statuses[status.server] = status
            return self._agreement.gathered(now)
        if status.server in self.contributors and status.outcome == "failed":
            return self._ended(status.server, status.outcome, status.error, now)
        if status.epoch == 0:
            evict = self._agreement.evict([status.server])
            if evict:
                return evict
        ballot = self._agreement.ballot
        if news and ballot is not None:
            return self._agreement.change(now)
        if self.state == "freezing" and ballot is not None:
            if status.epoch == self._known.epoch and status.server in ballot.members:
                ballot.statuses[status.server] = status
                return [] if ballot.silent else self._agreement.propose(ballot, now)
        elif self.state == "steady" and status.epoch == 0 and self._missed_something(status):
            return self._remind(status, now)
        return self._agreement.check_done()

    def _is_known(self, server: int) -> bool:
        """Whether the server that answers is in the incarnation in which it is a member, or was one."""
        incarnation = self._incarnations.get(server)
        if self._agreement.ballot is not None and server in self._agreement.ballot.members:
            return incarnation == self._agreement.ballot.incarnation(server)
        return incarnation == self._known.incarnation(server)

    def _stranger(self, status: msg.Status, news: bool, now: float) -> list[Instruction]:
        """A server in another incarnation than the one in which it is, or was, a member."""
        server, ballot = status.server, self._agreement.ballot
        if status.incarnation is None or status.installed is not None or status.outcome:
            evict = Post(
                server,
                msg.Evict(self.term, self._known.epoch, "another incarnation of it is in its place"),
            )
            return [evict, *(self._agreement.change(now) if news and ballot is not None else [])]
        if status.ready:
            self._joiners.asks_to_join(status.incarnation)
        if server in self.members and server not in self._findings.gone:
            return self._lost(server, "was started again", now)
        if ballot is not None and (news or server in ballot.newcomers):
            return self._agreement.change(now)
        return self._agreement.admit_or_promote(now)

    def _remind(self, status: msg.Status, now: float) -> list[Instruction]:
        """A member has reconnected that does not act on the view in force: it missed Install, or more."""
        assert self.view is not None
        if self._known.has_accepted(status):
            return [Post(status.server, msg.Install(self.term, self.view.epoch))]
        self._agreement.reason = f"server {status.server} came back without the view"
        self._findings.stale.add(status.server)
        self._findings.note_proof(now)
        return []

    def _missed_something(self, status: msg.Status) -> bool:
        """Whether a member that reconnected was not there when something was posted to it."""
        return status.server in self.members and not self._known.has_in_force(status)

    # --- other messages --------------------------------------------------------------------------

    def _message(self, server: int, message: msg.ToCoordinator, now: float) -> list[Instruction]:
        if isinstance(message, msg.Status | msg.Accepted | msg.Refused) and message.term != self.term:
            return []  # an answer to another coordinator
        match message:
            case msg.Status():
                return self._status(message, now)
            case msg.Accepted():
                return self._agreement.accept(message, now)
            case msg.Refused(_, _, promised):
                late = promised < self._known.epoch or self._agreement.ballot is None
                self._known.epoch = max(self._known.epoch, promised)
                return [] if late else self._agreement.change(now)
            case msg.Deposed(_, term):
                if term <= self.term:
                    return []
                self._agreement.stop()
                return self._ending.deposed(term)
            case msg.Suspect():
                return self._suspected(message, now) if server in self.members else []
            case msg.Held(_, peer) if server in self.members:
                self._findings.held_at[peer] = now
                return []
            case msg.Interrupted():
                return self._interrupted(message, now) if server in self.members else []
            case msg.Withdraw(observer, peer, level):
                self._findings.forget(
                    lambda each: (each.observer, each.peer, each.level) == (observer, peer, level)
                )
                self._agreement.settle_if_steady()
                return []
            case msg.Healthy(observer, peer, level):
                self._findings.trusted.add((observer, peer, level))
                return self._agreement.heal(now)
            case msg.Relapsed(observer, peer, level):
                self._findings.trusted.discard((observer, peer, level))
                return []
            case msg.Measured():
                self._agreement.measured(message, now)
                return []
            case msg.CanSendState():
                self._joiners.can_send_state(server)
                return self._agreement.admit_or_promote(now)
            case msg.CaughtUp(_, epoch) | msg.NeedsState(_, epoch):
                if epoch == epoch_of(self.view):
                    caught_up, joiners = isinstance(message, msg.CaughtUp), self._joiners
                    (joiners.caught_up if caught_up else joiners.needs_state)(server)
                return self._agreement.admit_or_promote(now)
            case msg.Leaves(_, why):
                return self._leaves(server, why, now)
            case msg.Progress(_, step):
                self._known.committed = max(self._known.committed, step)
                return []
            case msg.Ended(_, outcome, error, step):
                answer = [Post(server, msg.Noted(self.term))] if server in self._ending.outcomes else []
                if not self._is_known(server):  # it speaks for itself: the view may have its predecessor
                    self._ending.outcomes[server] = outcome
                    return [*answer, *self._not_let_in(server, now)]
                noted = self._noted(server, outcome, step)
                return [*answer, *noted, *self._ended(server, outcome, error, now)]
            case msg.Inject() | msg.Held() | msg.Ask():
                return []  # for the shell alone, or of a server that is out

    def _leaves(self, server: int, why: str, now: float) -> list[Instruction]:
        """A server was asked to leave: its contribution is not in the next step, so act at once."""
        self._joiners.drop(server)
        if server not in self.members:
            return self._agreement.evict([server])
        self._findings.gone.setdefault(server, f"leaves: {why}")
        if self.state == "gathering":
            return self._agreement.gathered(now)
        self._findings.note(now, 0.0)
        return []

    def _noted(self, server: int, outcome: str, step: int) -> list[Instruction]:
        news = self._ending.ended(server, outcome, step)
        return self._agreement.returned(self.members) if news else []

    def _ended(self, server: int, outcome: str, error: str, now: float) -> list[Instruction]:
        if outcome == "failed" and server in self.contributors:
            return self._agreement.abort("training", error, server)
        if outcome == "failed" and server in self.members:  # a learner: the job goes on without it
            return self._leaves(server, error, now)
        return self._not_let_in(server, now)

    def _not_let_in(self, server: int, now: float) -> list[Instruction]:
        """A server has ended that the view in force does not count on."""
        if self._agreement.ballot is not None and server in self._agreement.ballot.newcomers:
            self._joiners.drop(server)
            return self._agreement.change(now)
        return self._agreement.check_done()


__all__ = [
    "Connected",
    "Coordinator",
    "Event",
    "Finished",
    "From",
    "Gone",
    "Instruction",
    "Post",
    "Tick",
    "Unreached",
]
