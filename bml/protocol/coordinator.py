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
    Interrupt,
    Post,
    Tick,
)
from bml.protocol.decision import epoch_of, is_open
from bml.protocol.findings import Findings
from bml.protocol.messages import View
from bml.protocol.roster import Roster, learners_of, lives_of, works_again
from bml.protocol.timeouts import Timeouts
from faults import Diagnosis, Settlement, Suspicion, diagnose, settle
from faults.healing import healed
from topology import Fabric, ServerFailure, parse_failure


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
        self.view: View | None = None  # the newest one known, whose decisions count
        self._chosen: View | None = None  # the newest one known to be in force
        self.steps: dict[int, int] = {}
        self.outcomes: dict[int, str] = {}
        self._fabric = fabric
        self._absent = frozenset(absent)
        self._timeouts = timeouts
        self._min_servers = min_servers
        self._statuses: dict[int, msg.Status] = {}  # while gathering
        self._epoch = 0
        self._ballot: Ballot | None = None  # while freezing and proposing
        self._proposals: set[View] = set()  # since the last one that was accepted by all
        self._roster = Roster()
        self._findings = Findings(timeouts, now)
        self._healed: frozenset[str] = frozenset()
        self._reason = ""
        self._farewell: msg.ToServer | None = None
        self._answer_by = now + timeouts.start_s

    @property
    def members(self) -> tuple[int, ...]:
        """Servers of the newest view; before there is one, those that are to be in the first."""
        return self.view.members if self.view else self._first()

    def _first(self) -> tuple[int, ...]:
        return tuple(server for server in self._fabric.servers if server not in self._absent)

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members without those that only learn."""
        return self.view.contributors if self.view else self._first()

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
            return self._late(event)
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
            case Interrupt(why):
                return self._abort("interrupted", why)
            case Tick():
                return self._tick(now)

    def _again(self, server: int) -> list[Instruction]:
        """What a server that reconnects may have missed; Evict is said again to its Status."""
        if self._ballot is None or server not in self._ballot.members:
            return []
        if self._ballot.proposal is None:
            return [Post(server, msg.Freeze(self.term, self._epoch, self._reason))]
        return [Post(server, msg.Propose(self.term, self._ballot.proposal))]

    def _late(self, event: Event) -> list[Instruction]:
        """After the end: whoever still appears is told."""
        match event:
            case Connected(server) if self._farewell:
                return [Post(server, self._farewell)]
            case From(_, msg.Deposed(_, term)):
                return self._deposed(term)
        return []

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
        if self.view is None and dead and self._min_servers is None:
            names = ", ".join(f"server {server} ({why})" for server, why in sorted(dead.items()))
            return self._abort("start", f"cannot start: {names}")
        if self.view is not None:
            self._findings.forget_deaths(self.members)
        failed = [server for server in self.contributors if self.outcomes.get(server) == "failed"]
        if failed:
            return self._ended(failed[0], "failed", self._statuses[failed[0]].error, now)
        settled = self.view is not None and all(
            status.promised == status.installed.epoch == self.view.epoch if status.installed else False
            for server, status in self._statuses.items()
            if server in self.members
        )
        if settled and not self._findings.dead:
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
        """Take over what another coordinator did: newer promises and views. Returns whether there was any."""
        news = status.promised > self._epoch
        self._epoch = max(self._epoch, status.promised)
        for view in (status.installed, status.accepted):
            # One of ours that is not in force yet may never be: only we could have said so.
            if view is not None and view not in self._proposals and view.epoch > epoch_of(self.view):
                if self.view is None:
                    self._answer_by = min(self._answer_by, now + self._timeouts.connect_s)
                self.view = view
                news = True
        if epoch_of(status.installed) > epoch_of(self._chosen):
            self._chosen = status.installed
        return news

    # --- changing the view -----------------------------------------------------------------------

    def _change(self, now: float) -> list[Instruction]:
        """Diagnose all evidence and freeze the survivors."""
        self._findings.forget(self._is_void)
        self._rest_if_steady()
        admitted, promoted = self._roster.admitted(self.view), self._roster.promoted(self.view)
        back = works_again(self._fabric, self._standing(), admitted)
        fabric = self._fabric.without(*(part for part in self._standing() if part not in back))
        diagnosis = diagnose(fabric, self._findings.evidence(fabric, is_open))
        if not set(fabric.servers) - {f.server for f in diagnosis.failures if isinstance(f, ServerFailure)}:
            return self._too_few((), diagnosis.reason)
        settlement = settle(fabric, diagnosis.failures)
        reason = _explained(diagnosis, settlement)
        broken = {*fabric.failures, *settlement.failures}
        admitted = self._roster.reached(admitted, settlement.members, broken)
        learners = learners_of(settlement.members, self.view, admitted, promoted)
        left = tuple(server for server in settlement.members if server not in learners)
        if all(self.outcomes.get(server) == "done" for server in left):
            return self._finish()  # whoever is left needs no view
        if not self._enough(len(left)):
            return self._too_few(left, reason)
        for server in admitted:
            self.outcomes.pop(server, None)  # those of its earlier life
        news = "; ".join(filter(None, (reason, self._good_news(admitted, promoted))))
        self._reason = news or self._reason or ("new coordinator" if self.view else "start")
        failures = tuple(str(each) for each in sorted(broken))
        self._epoch += 1
        view = View(
            epoch=self._epoch,
            members=settlement.members,
            failures=failures,
            commit=0,
            reason=self._reason,
            detect_s=self._findings.detect_s(now),
            failed=self._failed(failures),
            learners=learners,
            joined=lives_of(settlement.members, self.view, admitted),
        )
        return self._freeze(Ballot(view, frozenset(admitted)), now)

    def _freeze(self, ballot: Ballot, now: float) -> list[Instruction]:
        self._ballot = ballot
        self._statuses = {}
        self.state = "freezing"
        self._findings.act_at = None
        self._findings.astray.clear()  # whoever is asked now is told
        self._answer_by = now + self._timeouts.answer_s
        freeze = msg.Freeze(self.term, self._epoch, self._reason)
        return [*self._evict(self._fabric.servers), *(Post(server, freeze) for server in ballot.members)]

    def _good_news(self, admitted: Iterable[int], promoted: Iterable[int]) -> str:
        news = [f"{', '.join(sorted(self._healed))} works again"] if self._healed else []
        news += [f"server {server} joins" for server in admitted]
        news += [f"server {server} has caught up" for server in sorted(promoted)]
        return "; ".join(news)

    def _grow(self, now: float) -> list[Instruction]:
        """Let in who waits, and let contribute who has caught up, once nothing else is the matter."""
        if self.state != "steady" or self._findings.fresh:
            return []
        news = self._roster.admitted(self.view) or self._roster.promoted(self.view)
        return self._change(now) if news else []

    def _standing(self) -> tuple[str, ...]:
        """The failures of the newest view without those that are over."""
        if self.view is None:
            return tuple(f"server:{server}" for server in sorted(self._absent))
        return tuple(part for part in self.view.failures if part not in self._healed)

    def _heal(self, now: float) -> list[Instruction]:
        """Use again what has worked for long enough, once nothing else is the matter."""
        findings = self._findings
        if self.state != "steady" or self.view is None or findings.fresh or not findings.trusted:
            return []
        parts = [parse_failure(part) for part in self.view.failures]
        self._healed = frozenset(str(part) for part in healed(self._fabric, parts, findings.trusted))
        return self._change(now) if self._healed else []

    def _failed(self, failures: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """How often links and switches have failed, with those of the next view that are new."""
        times = dict(self.view.failed) if self.view else {}
        standing = self._standing()
        for part in failures:
            if part not in standing and not part.startswith("server:"):
                times[part] = times.get(part, 0) + 1
        return tuple(sorted(times.items()))

    def _evict(self, servers: Iterable[int]) -> list[Instruction]:
        """Tell those that are out, now and whenever they appear again: they would wait for ever."""
        members = self._ballot.members if self._ballot else self.members
        evict = msg.Evict(self.term, self._epoch, self._reason or "a view without it is in force")
        out = (server for server in servers if server not in members and not self._roster.waits(server))
        return [Post(server, evict) for server in out]

    def _before(self) -> tuple[int, ...]:
        """The members of whom more than half must go on.

        Those of the newest view that is known to be in force: one that was only accepted by some may never
        have been, and then the rest is free to go on with another coordinator.
        """
        return self._chosen.contributors if self._chosen else self._first()

    def _enough(self, left: int) -> bool:
        return left >= self._min_servers if self._min_servers is not None else 2 * left > len(self._before())

    def _too_few(self, left: tuple[int, ...], reason: str) -> list[Instruction]:
        old = self._before()
        if self._min_servers is not None:
            need = f"min_servers is {self._min_servers}"
        else:
            need = f"more than half of the {len(old)} before are needed (min_servers sets another limit)"
        text = f"only {len(left)} of {len(old)} servers are left, {list(left)}: {need}. {reason}"
        return self._abort("too-few", text)

    def _status(self, status: msg.Status, now: float) -> list[Instruction]:
        news = self._learn(status, now)
        if not self._is_known(status):
            return self._stranger(status, news, now)
        if status.outcome:
            self.outcomes[status.server] = status.outcome
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
            if status.epoch == self._epoch and status.server in ballot.members:
                ballot.statuses[status.server] = status
                return [] if ballot.silent else self._propose(ballot, now)
        elif self.state == "steady" and status.epoch == 0 and self._out_of_step(status):
            return self._remind(status, now)
        return self._check_done()

    def _is_known(self, status: msg.Status) -> bool:
        """Whether the server is in the life in which it is a member, or was one."""
        if self._ballot is not None and status.server in self._ballot.members:
            return status.life == self._ballot.life(status.server)
        return status.life == (self.view.life(status.server) if self.view else None)

    def _stranger(self, status: msg.Status, news: bool, now: float) -> list[Instruction]:
        """A server in another life than the one in which it is, or was, a member."""
        server, ballot = status.server, self._ballot
        if status.life is None or status.installed is not None or status.outcome:
            evict = Post(server, msg.Evict(self.term, self._epoch, "another life of it is in its place"))
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
        if status.accepted == self.view and status.promised == self.view.epoch:
            return [Post(status.server, msg.Install(self.term, self.view.epoch))]
        self._reason = f"server {status.server} came back without the view"
        self._findings.astray.add(status.server)
        self._findings.note_proof(now)
        return []

    def _out_of_step(self, status: msg.Status) -> bool:
        """A member that reconnected may have missed what was posted to it."""
        assert self.view is not None
        stands_at = (epoch_of(status.installed), status.promised)
        return status.server in self.members and stands_at != (self.view.epoch, self.view.epoch)

    def _propose(self, ballot: Ballot, now: float) -> list[Instruction]:
        """Every survivor has reported: COMMIT or RETRY."""
        proposal = ballot.decide(self.view)
        self._proposals.add(proposal)
        self.state = "proposing"
        self._answer_by = now + self._timeouts.answer_s
        return [Post(server, msg.Propose(self.term, proposal)) for server in ballot.members]

    def _accept(self, message: msg.Accepted, now: float) -> list[Instruction]:
        ballot = self._ballot
        if ballot is None or ballot.proposal is None or message.epoch != self._epoch:
            return []
        ballot.accepted.add(message.server)
        if ballot.silent:
            return []
        self.view = self._chosen = ballot.proposal
        self._ballot = None
        self._proposals.clear()
        self._healed = frozenset()
        self.state = "steady"
        self._roster.settle(self.view)
        self._forget_explained(self.view)
        out: list[Instruction] = [
            Post(server, msg.Install(self.term, self._epoch)) for server in self.view.members
        ]
        return out + self._check_done() + self._grow(now)

    def _forget_explained(self, view: View) -> None:
        """Keep only the evidence that the new view does not answer."""
        fabric = self._fabric.without(*view.failures)
        self._findings.trusted.clear()  # servers listen anew in every view
        self._findings.forget_deaths(view.members)
        self._findings.forget(lambda each: not is_open(fabric, each))
        self._rest_if_steady()

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
                late = promised < self._epoch or self._ballot is None
                self._epoch = max(self._epoch, promised)
                return [] if late else self._change(now)
            case msg.Deposed(_, term):
                return self._deposed(term)
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
        self.outcomes[server] = outcome
        if outcome == "failed" and server in self.contributors:
            return self._abort("training", error, server)
        if outcome == "failed" and server in self.members:  # a learner is the loss of nobody
            return self._leaves(server, error, now)
        if self._ballot is not None and server in self._ballot.newcomers:
            self._roster.drop(server)
            return self._change(now)
        return self._check_done()

    def _check_done(self) -> list[Instruction]:
        if self.state != "steady" or any(self.outcomes.get(server) != "done" for server in self.contributors):
            return []
        return self._finish()

    def _finish(self) -> list[Instruction]:
        self.state, self._ballot = "stopped", None
        self._farewell = shutdown = msg.Shutdown(self.term)
        return [*(Post(server, shutdown) for server in self._fabric.servers), Finished(None)]

    def _deposed(self, term: int) -> list[Instruction]:
        if term <= self.term:
            return []
        self.state, self._ballot = "stopped", None
        self._farewell = None
        return [Finished(None, deposed=True)]

    def _abort(self, kind: str, text: str, server: int = -1) -> list[Instruction]:
        self.state, self._ballot = "stopped", None
        self._farewell = abort = msg.Abort(self.term, kind, text, server)
        return [*(Post(server, abort) for server in self._fabric.servers), Finished(abort)]


def _explained(diagnosis: Diagnosis, settlement: Settlement) -> str:
    reason = diagnosis.reason if diagnosis.failures else ""
    more = len(settlement.failures) > len(diagnosis.failures)
    return "; ".join(filter(None, (reason, settlement.reason))) if more else reason


__all__ = [
    "Connected",
    "Coordinator",
    "Event",
    "Finished",
    "From",
    "Gone",
    "Instruction",
    "Interrupt",
    "Post",
    "Tick",
]
