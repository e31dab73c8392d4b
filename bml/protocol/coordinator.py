"""The coordinator: gathers evidence, decides views, and holds nothing that the servers do not hold.

State table:

    state      event                                    becomes    and
    ---------  ---------------------------------------  ---------  -----------------------------------
    gathering  every server of the newest view has      steady     goes on with that view, or changes
               answered Who, or is known to be gone                it if any is missing or frozen
    steady     evidence, its window is over             freezing   diagnoses; Freeze(epoch+1) to the
                                                                   survivors, Evict to the others
    freezing   every Status is there                    proposing  decides COMMIT or RETRY; Propose
    proposing  every Accepted is there                  steady     Install
    freezing,  more evidence, or no answer in time      freezing   again, with a higher epoch
    proposing
    any        too few servers, a training error        stopped    Abort to all
    steady     a joiner waits, a learner has caught up  freezing   as after evidence: the next view has it
    steady     every contributor is done                stopped    Shutdown to all
    any        a change, all who are left are done      stopped    Shutdown to them
    any        Deposed: a successor is at work          stopped    nothing more is said to anybody

A new coordinator starts in `gathering` too: start-up and takeover are one path. Why the decision is
safe is told in docs/architecture.md and in member.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from bml.protocol import messages as msg
from bml.protocol.ballot import Ballot
from bml.protocol.coordinator_events import (
    Connected,
    Event,
    Finished,
    From,
    Gone,
    Instruction,
    Post,
    Tick,
)
from bml.protocol.decision import epoch_of
from bml.protocol.draft import draft
from bml.protocol.ending import Ending
from bml.protocol.findings import Findings
from bml.protocol.known import KnownViews
from bml.protocol.messages import View
from bml.protocol.roster import Roster
from bml.protocol.timeouts import Timeouts
from faults import Suspicion
from topology import Fabric


class Coordinator:
    """See the module's text.

    `term` grows with every coordinator of a job. `min_servers`: fewer than that stop the job; None:
    a view must have more than half of the members of the one before. `absent` servers are not there from the
    beginning, and may join.
    """

    def __init__(
        self,
        fabric: Fabric,
        term: int,
        timeouts: Timeouts,
        min_servers: int | None,
        now: float,
        absent: Iterable[int] = (),
    ):
        self.term = term
        self.state = "gathering"
        self.steps: dict[int, int] = {}
        self._fabric = fabric
        self._absent = frozenset(absent)
        self._timeouts = timeouts
        self._ending = Ending(term, fabric.servers)
        self._statuses: dict[int, msg.Status] = {}  # while gathering
        first = (server for server in fabric.servers if server not in self._absent)
        self._known = KnownViews(tuple(first), min_servers)
        self._ballot: Ballot | None = None  # while freezing and proposing
        self._roster = Roster()
        self._findings = Findings(timeouts, now)
        self._reason = ""
        self._answer_by = now + timeouts.start_s

    @property
    def view(self) -> View | None:
        """The newest view that is known, whose decisions count."""
        return self._known.view

    @property
    def members(self) -> tuple[int, ...]:
        """Servers of the newest view; before there is one, those that are to be in the first."""
        return self._known.members

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members without those that only learn."""
        return self._known.contributors

    @property
    def outcomes(self) -> dict[int, str]:
        """How the training functions ended that have, by server."""
        return self._ending.outcomes

    @property
    def awaited(self) -> list[int]:
        """The servers without whose answer nothing goes on."""
        if self._ballot is not None:
            return self._ballot.silent
        if self.state == "gathering":
            return [server for server in self.members if server not in self._statuses]
        return []

    @property
    def waiting(self) -> tuple[int, ...]:
        """Servers that want to join, and are in no view yet."""
        return self._roster.waiting

    @property
    def suspicions(self) -> list[str]:
        """Who is suspected by whom and why, in words."""
        return self._findings.texts

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, a Tick is due."""
        due = [self._answer_by] if self.state in ("gathering", "freezing", "proposing") else []
        act_at = self._findings.act_at
        return min([*due, *([act_at] if act_at is not None else [])], default=now + 3600)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """React to an event at time `now` (seconds)."""
        if self.state == "stopped":
            return self._ending.late(event)
        match event:
            case Connected(server):
                # It says again what it still suspects.
                self._findings.forget(lambda each: each.observer == server)
                self._rest_if_steady()
                return [Post(server, msg.Who(self.term)), *self._again(server)]
            case Gone(server, why):
                return self._gone(server, why, now)
            case From(server, message):
                return self._message(server, message, now)
            case Tick():
                return self._tick(now)

    def _again(self, server: int) -> list[Instruction]:
        """What a server that reconnects may have missed; Evict is said again to its Status."""
        if self._ballot is None or server not in self._ballot.members:
            return []
        return [Post(server, self._ballot.question(self.term))]

    # --- evidence --------------------------------------------------------------------------------

    def _gone(self, server: int, why: str, now: float) -> list[Instruction]:
        self._roster.drop(server)
        if self._ballot is not None and server in self._ballot.newcomers:
            return self._change(now)
        if server not in self.members or server in self._findings.dead:
            return []
        return self._lost(server, why, now)

    def _lost(self, server: int, why: str, now: float) -> list[Instruction]:
        """There is proof that a member is gone."""
        self._findings.dead[server] = why
        if self.state == "gathering":
            return self._gathered(now)
        self._findings.note_proof(now)
        return []

    def _suspected(self, message: msg.Suspect, now: float) -> list[Instruction]:
        self._findings.suspect(message)
        if self.state != "gathering":
            self._findings.note_suspicion(message, now)
        return []

    def _tick(self, now: float) -> list[Instruction]:
        findings = self._findings
        if self._ballot is not None and now >= self._answer_by:
            for server in self.awaited:
                self._roster.drop(server)
                findings.dead.setdefault(server, f"no answer within {self._timeouts.answer_s:g} s")
            return self._change(now)
        if self.state == "gathering" and now >= self._answer_by:
            for server in self.awaited:
                findings.dead.setdefault(server, "did not appear")
            return self._gathered(now)
        if findings.act_at is not None and now >= findings.act_at and self.state != "gathering":
            findings.act_at = None
            return self._change(now) if findings.fresh else []
        return self._heal(now) or self._grow(now)

    # --- gathering: start-up and takeover --------------------------------------------------------

    def _gathered(self, now: float) -> list[Instruction]:
        dead = self._findings.dead
        if any(server not in dead for server in self.awaited):
            return []
        if self.view is None and dead and self._known.min_servers is None:
            names = ", ".join(f"server {server} ({why})" for server, why in sorted(dead.items()))
            return self._abort("start", f"cannot start: {names}")
        if self.view is not None:
            self._findings.forget_deaths(self.members)
        failed = [server for server in self.contributors if self.outcomes.get(server) == "failed"]
        if failed:
            return self._ended(failed[0], "failed", self._statuses[failed[0]].error, now)
        here = (status for server, status in self._statuses.items() if server in self.members)
        settled = all(self._known.has_in_force(status) for status in here)
        if self.view is not None and settled and not self._findings.dead:
            self.state = "steady"
            if self._findings.suspected:
                self._findings.note(now, self._timeouts.silence_window_s)
            return [*self._evict(self._fabric.servers), *self._check_done(), *self._grow(now)]
        self._findings.since_s = now
        return self._change(now)

    def _is_void(self, suspicion: Suspicion) -> bool:
        """Whether a peer was not heard because the view had not reached it: it lives, and waits for one."""
        known = self._ballot.statuses if self._ballot else self._statuses
        status = known.get(suspicion.peer)
        outside = status is not None and epoch_of(status.installed) < epoch_of(self.view)
        return suspicion.peer != suspicion.observer and outside

    def _learn(self, status: msg.Status, now: float) -> bool:
        """Take over what another coordinator did. Returns whether there was anything new."""
        was_first = self.view is None
        news = self._known.learn(status)
        if was_first and self.view is not None:  # its servers run: they need no time to start
            self._answer_by = min(self._answer_by, now + self._timeouts.connect_s)
        return news

    # --- changing the view -----------------------------------------------------------------------

    def _change(self, now: float) -> list[Instruction]:
        """Diagnose all evidence and freeze the survivors."""
        self._findings.forget(self._is_void)
        self._rest_if_steady()
        next_ = draft(self._fabric, self.view, self._absent, self._findings, self._roster)
        if next_.members and self._ending.done(next_.contributors):
            return self._finish()  # whoever is left needs no view
        shortage = self._known.shortage(next_.contributors)
        if shortage:
            return self._abort("too-few", f"{shortage}. {next_.reason}")
        for server in next_.newcomers:
            self._ending.outcomes.pop(server, None)  # those of its earlier life
        self._reason = next_.news or self._reason or ("new coordinator" if self.view else "start")
        self._known.epoch += 1
        view = next_.view(self._known.epoch, self._reason, self._findings.detect_s(now))
        return self._freeze(Ballot(view, next_.newcomers), now)

    def _freeze(self, ballot: Ballot, now: float) -> list[Instruction]:
        self._ballot = ballot
        self._statuses = {}
        self.state = "freezing"
        self._findings.act_at = None
        self._findings.astray.clear()  # whoever is asked now is told
        return [*self._evict(self._fabric.servers), *self._ask(ballot, now)]

    def _ask(self, ballot: Ballot, now: float) -> list[Instruction]:
        self._answer_by = now + self._timeouts.answer_s
        question = ballot.question(self.term)
        return [Post(server, question) for server in ballot.members]

    def _grow(self, now: float) -> list[Instruction]:
        """Let in who waits, and let contribute who has caught up, once nothing else is the matter."""
        if self.state != "steady" or self._findings.fresh:
            return []
        news = self._roster.admitted(self.view) or self._roster.promoted(self.view)
        return self._change(now) if news else []

    def _heal(self, now: float) -> list[Instruction]:
        """Use again what has worked for long enough, once nothing else is the matter."""
        findings = self._findings
        if self.state != "steady" or self.view is None or findings.fresh or not findings.trusted:
            return []
        return self._change(now) if findings.heal(self._fabric, self.view.failures) else []

    def _evict(self, servers: Iterable[int]) -> list[Instruction]:
        """Tell those that are out, now and whenever they appear again: they would wait for ever."""
        members = self._ballot.members if self._ballot else self.members
        evict = msg.Evict(self.term, self._known.epoch, self._reason or "a view without it is in force")
        out = (server for server in servers if server not in members and not self._roster.waits(server))
        return [Post(server, evict) for server in out]

    def _status(self, status: msg.Status, now: float) -> list[Instruction]:
        news = self._learn(status, now)
        if not self._is_known(status):
            return self._stranger(status, news, now)
        if status.outcome:
            self._ending.outcomes[status.server] = status.outcome
        if self.state == "gathering":
            self._statuses[status.server] = status
            return self._gathered(now)
        if status.server in self.contributors and status.outcome == "failed":
            return self._ended(status.server, status.outcome, status.error, now)
        if status.epoch == 0:
            evict = self._evict([status.server])
            if evict:
                return evict
        ballot = self._ballot
        if news and ballot is not None:
            return self._change(now)
        if self.state == "freezing" and ballot is not None:
            if status.epoch == self._known.epoch and status.server in ballot.members:
                ballot.statuses[status.server] = status
                return [] if ballot.silent else self._propose(ballot, now)
        elif self.state == "steady" and status.epoch == 0 and self._missed_something(status):
            return self._remind(status, now)
        return self._check_done()

    def _is_known(self, status: msg.Status) -> bool:
        """Whether the server is in the life in which it is a member, or was one."""
        if self._ballot is not None and status.server in self._ballot.members:
            return status.life == self._ballot.life(status.server)
        return status.life == self._known.life(status.server)

    def _stranger(self, status: msg.Status, news: bool, now: float) -> list[Instruction]:
        """A server in another life than the one in which it is, or was, a member."""
        server, ballot = status.server, self._ballot
        if status.life is None or status.installed is not None or status.outcome:
            evict = Post(
                server, msg.Evict(self.term, self._known.epoch, "another life of it is in its place")
            )
            return [evict, *(self._change(now) if news and ballot is not None else [])]
        self._roster.knocks(status.life)
        if server in self.members and server not in self._findings.dead:
            return self._lost(server, "it was started again", now)
        if ballot is not None and (news or server in ballot.newcomers):
            return self._change(now)
        return self._grow(now)

    def _remind(self, status: msg.Status, now: float) -> list[Instruction]:
        """A member has reconnected that does not act on the view in force: it missed Install, or more."""
        assert self.view is not None
        if self._known.has_accepted(status):
            return [Post(status.server, msg.Install(self.term, self.view.epoch))]
        self._reason = f"server {status.server} came back without the view"
        self._findings.astray.add(status.server)
        self._findings.note_proof(now)
        return []

    def _missed_something(self, status: msg.Status) -> bool:
        """Whether a member that reconnected was not there when something was posted to it."""
        return status.server in self.members and not self._known.has_in_force(status)

    def _propose(self, ballot: Ballot, now: float) -> list[Instruction]:
        """Every survivor has reported: COMMIT or RETRY."""
        self._known.propose(ballot.decide(self.view))
        self.state = "proposing"
        return self._ask(ballot, now)

    def _accept(self, message: msg.Accepted, now: float) -> list[Instruction]:
        ballot = self._ballot
        if ballot is None or ballot.proposal is None or message.epoch != self._known.epoch:
            return []
        ballot.accepted.add(message.server)
        if ballot.silent:
            return []
        view, self._ballot = ballot.proposal, None
        self._known.choose(view)
        self.state = "steady"
        self._roster.settle(view)
        self._findings.answered(view, self._fabric.without(*view.failures))
        self._rest_if_steady()
        out: list[Instruction] = [
            Post(server, msg.Install(self.term, self._known.epoch)) for server in view.members
        ]
        return out + self._check_done() + self._grow(now)

    def _rest_if_steady(self) -> None:
        if self.state == "steady":
            self._findings.rest()

    # --- other messages --------------------------------------------------------------------------

    def _message(self, server: int, message: msg.ToCoordinator, now: float) -> list[Instruction]:
        if isinstance(message, msg.Status | msg.Accepted | msg.Refused) and message.term != self.term:
            return []  # an answer to another coordinator
        match message:
            case msg.Status():
                return self._status(message, now)
            case msg.Accepted():
                return self._accept(message, now)
            case msg.Refused(_, _, promised):
                late = promised < self._known.epoch or self._ballot is None
                self._known.epoch = max(self._known.epoch, promised)
                return [] if late else self._change(now)
            case msg.Deposed(_, term):
                if term <= self.term:
                    return []
                self._stop()
                return self._ending.deposed()
            case msg.Suspect():
                return self._suspected(message, now) if server in self.members else []
            case msg.Withdraw(observer, peer, level):
                self._findings.forget(
                    lambda each: (each.observer, each.peer, each.level) == (observer, peer, level)
                )
                self._rest_if_steady()
                return []
            case msg.Healthy(observer, peer, level):
                self._findings.trusted.add((observer, peer, level))
                return self._heal(now)
            case msg.Relapsed(observer, peer, level):
                self._findings.trusted.discard((observer, peer, level))
                return []
            case msg.Gives():
                self._roster.gives(server)
                return self._grow(now)
            case msg.CaughtUp(_, epoch):
                if epoch == epoch_of(self.view):
                    self._roster.caught_up(server)
                return self._grow(now)
            case msg.Leaves(_, why):
                return self._leaves(server, why, now)
            case msg.Progress(_, step):
                self.steps[server] = step
                return []
            case msg.Ended(_, outcome, error):
                return self._ended(server, outcome, error, now)
            case msg.Inject():
                return []  # for the shell alone

    def _leaves(self, server: int, why: str, now: float) -> list[Instruction]:
        """It was asked to go: nothing of it is in the step that comes, nobody need wait to find out."""
        self._roster.drop(server)
        if server not in self.members:
            return self._evict([server])
        self._findings.dead.setdefault(server, f"it leaves: {why}")
        if self.state == "gathering":
            return self._gathered(now)
        self._findings.note(now, 0.0)
        return []

    def _ended(self, server: int, outcome: str, error: str, now: float) -> list[Instruction]:
        self._ending.outcomes[server] = outcome
        if outcome == "failed" and server in self.contributors:
            return self._abort("training", error, server)
        if outcome == "failed" and server in self.members:  # a learner is the loss of nobody
            return self._leaves(server, error, now)
        if self._ballot is not None and server in self._ballot.newcomers:
            self._roster.drop(server)
            return self._change(now)
        return self._check_done()

    def _check_done(self) -> list[Instruction]:
        if self.state != "steady" or not self._ending.done(self.contributors):
            return []
        return self._finish()

    def _finish(self) -> list[Instruction]:
        self._stop()
        return self._ending.finish()

    def _abort(self, kind: str, text: str, server: int = -1) -> list[Instruction]:
        self._stop()
        return self._ending.abort(kind, text, server)

    def _stop(self) -> None:
        self.state, self._ballot = "stopped", None


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
]
