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

from collections.abc import Callable, Iterable

from bml.protocol import messages as msg
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
from bml.protocol.decision import decide, epoch_of, is_open
from bml.protocol.messages import Life, View
from bml.protocol.roster import Roster, learners_of, lives_of, works_again
from bml.protocol.timeouts import Timeouts
from faults import Evidence, Suspicion, diagnose, settle
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
        self._statuses: dict[int, msg.Status] = {}
        self._accepted: set[int] = set()
        self._epoch = 0
        self._next_members: tuple[int, ...] = ()
        self._next_failures: tuple[str, ...] = ()
        self._next_learners: tuple[int, ...] = ()
        self._next_joined: tuple[Life, ...] = ()
        self._newcomers: frozenset[int] = frozenset()  # of the next view: nothing is decided by them
        self._roster = Roster()
        self._proposal: View | None = None
        self._proposals: set[View] = set()  # since the last one that was accepted by all
        self._reason = ""
        self._dead: dict[int, str] = {}
        self._suspicions: dict[tuple[int, int, int], Suspicion] = {}
        self._trusted: set[tuple[int, int, int]] = set()
        self._healed: frozenset[str] = frozenset()
        self._fresh = False  # evidence that no view has answered yet
        self._evidence_at = now
        self._silent_s = 0.0
        self._detect_s = 0.0
        self._farewell: msg.ToServer | None = None
        self._act_at: float | None = None
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
    def waiting(self) -> tuple[int, ...]:
        """Servers that want to join, and are in no view yet."""
        return self._roster.waiting

    @property
    def suspicions(self) -> list[str]:
        """Who is suspected by whom and why, in words."""
        said = [f"server {server}: {why}" for server, why in sorted(self._dead.items())]
        return said + [each.why for _, each in sorted(self._suspicions.items())]

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, a Tick is due."""
        due = [self._answer_by] if self.state in ("gathering", "freezing", "proposing") else []
        return min([*due, *([self._act_at] if self._act_at is not None else [])], default=now + 3600)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """React to an event at time `now` (seconds)."""
        if self.state == "stopped":
            return self._late(event)
        match event:
            case Connected(server):
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
        if server not in self._next_members:
            return []
        if self.state == "freezing":
            return [Post(server, msg.Freeze(self.term, self._epoch, self._reason))]
        if self.state == "proposing" and self._proposal:
            return [Post(server, msg.Propose(self.term, self._proposal))]
        return []

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
        if server in self._newcomers and self.state in ("freezing", "proposing"):
            return self._change(now)
        if server not in self.members or server in self._dead:
            return []
        self._dead[server] = why
        if self.state == "gathering":
            return self._gathered(now)
        return self._note(now, self._timeouts.proof_window_s, 0.0)

    def _note(self, now: float, window_s: float, silent_s: float) -> list[Instruction]:
        if not self._fresh:
            self._fresh = True
            self._evidence_at = now
            self._silent_s = silent_s
        act_at = now + window_s
        self._act_at = act_at if self._act_at is None else min(self._act_at, act_at)
        return []

    def _suspected(self, message: msg.Suspect, now: float) -> list[Instruction]:
        suspicion = Suspicion(
            message.observer, message.peer, message.level, message.kind, message.silent_s, message.why
        )
        self._suspicions[message.observer, message.peer, message.level] = suspicion
        if self.state == "gathering":
            return []
        silent = message.kind == "silence"
        window_s = self._timeouts.silence_window_s if silent else self._timeouts.proof_window_s
        return self._note(now, window_s, message.silent_s)

    def _tick(self, now: float) -> list[Instruction]:
        if self.state in ("freezing", "proposing") and now >= self._answer_by:
            for server in self._unanswered():
                self._roster.drop(server)
                self._dead.setdefault(server, f"no answer within {self._timeouts.answer_s:g} s")
            return self._change(now)
        if self.state == "gathering" and now >= self._answer_by:
            for server in self._unanswered():
                self._dead.setdefault(server, "did not appear")
            return self._gathered(now)
        if self._act_at is not None and now >= self._act_at and self.state != "gathering":
            self._act_at = None
            return self._change(now) if self._fresh else []
        return self._heal(now) or self._grow(now)

    def _unanswered(self) -> list[int]:
        if self.state == "gathering":
            return [server for server in self.members if server not in self._statuses]
        answered = self._statuses.keys() if self.state == "freezing" else self._accepted
        return [server for server in self._next_members if server not in answered]

    # --- gathering: start-up and takeover --------------------------------------------------------

    def _gathered(self, now: float) -> list[Instruction]:
        if any(server not in self._dead for server in self._unanswered()):
            return []
        if self.view is None and self._dead and self._min_servers is None:
            names = ", ".join(f"server {server} ({why})" for server, why in sorted(self._dead.items()))
            return self._abort("start", f"cannot start: {names}")
        if self.view is not None:  # that servers outside the view are gone is no news
            self._dead = {server: why for server, why in self._dead.items() if server in self.members}
        failed = [server for server in self.contributors if self.outcomes.get(server) == "failed"]
        if failed:
            return self._ended(failed[0], "failed", self._statuses[failed[0]].error, now)
        settled = self.view is not None and all(
            status.promised == status.installed.epoch == self.view.epoch if status.installed else False
            for server, status in self._statuses.items()
            if server in self.members
        )
        if settled and not self._dead:
            self.state = "steady"
            if self._suspicions:
                self._note(now, self._timeouts.silence_window_s, 0.0)
            return [*self._evict(self._fabric.servers), *self._check_done(), *self._grow(now)]
        self._evidence_at = now
        return self._change(now)

    def _is_void(self, suspicion: Suspicion) -> bool:
        """Whether a peer was not heard because the view had not reached it: it lives, and waits for one."""
        status = self._statuses.get(suspicion.peer)
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
        self._forget(self._is_void)
        admitted, promoted = self._roster.admitted(self.view), self._roster.promoted(self.view)
        back = works_again(self._fabric, self._standing(), admitted)
        fabric = self._fabric.without(*(part for part in self._standing() if part not in back))
        suspicions = tuple(each for _, each in sorted(self._suspicions.items()) if is_open(fabric, each))
        dead = {server: why for server, why in self._dead.items() if server in fabric.servers}
        diagnosis = diagnose(fabric, Evidence(dead, suspicions))
        if not set(fabric.servers) - {f.server for f in diagnosis.failures if isinstance(f, ServerFailure)}:
            return self._too_few((), diagnosis.reason)
        settlement = settle(fabric, diagnosis.failures)
        reason = diagnosis.reason if diagnosis.failures else ""
        if len(settlement.failures) > len(diagnosis.failures):
            reason = "; ".join(filter(None, (reason, settlement.reason)))
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
        self._detect_s = now - self._evidence_at + self._silent_s if self._fresh else 0.0
        self.state = "freezing"
        self._act_at = None
        self._reason = (
            "; ".join(filter(None, (reason, self._good_news(admitted, promoted))))
            or self._reason
            or ("new coordinator" if self.view else "start")
        )
        self._statuses = {}
        self._accepted = set()
        self._proposal = None
        self._next_members = settlement.members
        self._next_failures = tuple(str(each) for each in sorted(broken))
        self._next_learners = learners
        self._next_joined = lives_of(settlement.members, self.view, admitted)
        self._newcomers = frozenset(admitted)
        self._epoch += 1
        self._answer_by = now + self._timeouts.answer_s
        freeze = msg.Freeze(self.term, self._epoch, self._reason)
        return [*self._evict(self._fabric.servers), *(Post(server, freeze) for server in self._next_members)]

    def _good_news(self, admitted: Iterable[int], promoted: Iterable[int]) -> str:
        news = [f"{', '.join(sorted(self._healed))} works again"] if self._healed else []
        news += [f"server {server} joins" for server in admitted]
        news += [f"server {server} has caught up" for server in sorted(promoted)]
        return "; ".join(news)

    def _grow(self, now: float) -> list[Instruction]:
        """Let in who waits, and let contribute who has caught up, once nothing else is the matter."""
        if self.state != "steady" or self._fresh:
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
        if self.state != "steady" or self.view is None or self._fresh or not self._trusted:
            return []
        parts = [parse_failure(part) for part in self.view.failures]
        self._healed = frozenset(str(part) for part in healed(self._fabric, parts, self._trusted))
        return self._change(now) if self._healed else []

    def _failed(self) -> tuple[tuple[str, int], ...]:
        """How often links and switches have failed, with those of the next view that are new."""
        times = dict(self.view.failed) if self.view else {}
        standing = self._standing()
        for part in self._next_failures:
            if part not in standing and not part.startswith("server:"):
                times[part] = times.get(part, 0) + 1
        return tuple(sorted(times.items()))

    def _evict(self, servers: Iterable[int]) -> list[Instruction]:
        """Tell those that are out, now and whenever they appear again: they would wait for ever."""
        members = self._next_members if self.state in ("freezing", "proposing") else self.members
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
            self._forget(lambda each: each.observer == status.server)  # it says again what it still suspects
            evict = self._evict([status.server])
            if evict:
                return evict
        if news and self.state in ("freezing", "proposing"):
            return self._change(now)
        if self.state == "freezing" and status.epoch == self._epoch and status.server in self._next_members:
            self._statuses[status.server] = status
            return [] if self._unanswered() else self._propose(now)
        if self.state == "steady" and status.epoch == 0 and self._out_of_step(status):
            self._reason = f"server {status.server} came back without the view"
            return self._note(now, self._timeouts.proof_window_s, 0.0)
        return self._check_done()

    def _is_known(self, status: msg.Status) -> bool:
        """Whether the server is in the life in which it is a member, or was one."""
        asked = self.state in ("freezing", "proposing") and status.server in self._next_members
        lives = self._next_joined if asked else self.view.joined if self.view else ()
        return status.life == next((life for life in lives if life.server == status.server), None)

    def _stranger(self, status: msg.Status, news: bool, now: float) -> list[Instruction]:
        """A server in another life than the one in which it is, or was, a member."""
        server = status.server
        busy = self.state in ("freezing", "proposing")
        if status.life is None or status.installed is not None or status.outcome:
            evict = Post(server, msg.Evict(self.term, self._epoch, "another life of it is in its place"))
            return [evict, *(self._change(now) if news and busy else [])]
        self._roster.knocks(status.life)
        if server in self.members and server not in self._dead:
            self._dead[server] = "it was started again"
            if self.state == "gathering":
                return self._gathered(now)
            return self._note(now, self._timeouts.proof_window_s, 0.0)
        if busy and (news or server in self._newcomers):
            return self._change(now)
        return self._grow(now)

    def _out_of_step(self, status: msg.Status) -> bool:
        """A member that reconnected may have missed what was posted to it."""
        assert self.view is not None
        stands_at = (epoch_of(status.installed), status.promised)
        return status.server in self.members and stands_at != (self.view.epoch, self.view.epoch)

    def _propose(self, now: float) -> list[Instruction]:
        """Every survivor has reported: COMMIT or RETRY."""
        self._proposal = View(
            epoch=self._epoch,
            members=self._next_members,
            failures=self._next_failures,
            commit=decide(each for each in self._statuses.values() if each.server not in self._newcomers),
            reason=self._reason,
            detect_s=self._detect_s,
            failed=self._failed(),
            learners=self._next_learners,
            joined=self._next_joined,
        )
        self._proposals.add(self._proposal)
        self.state = "proposing"
        self._answer_by = now + self._timeouts.answer_s
        return [Post(server, msg.Propose(self.term, self._proposal)) for server in self._next_members]

    def _accept(self, message: msg.Accepted, now: float) -> list[Instruction]:
        if self.state != "proposing" or message.epoch != self._epoch:
            return []
        self._accepted.add(message.server)
        if self._unanswered():
            return []
        assert self._proposal is not None
        self.view = self._chosen = self._proposal
        self._proposals.clear()
        self._trusted.clear()  # servers listen anew in every view
        self._healed = frozenset()
        self._statuses = {}
        self.state = "steady"
        self._newcomers = frozenset()
        self._roster.settle(self.view)
        self._forget_explained()
        out: list[Instruction] = [
            Post(server, msg.Install(self.term, self._epoch)) for server in self.view.members
        ]
        return out + self._check_done() + self._grow(now)

    def _forget_explained(self) -> None:
        """Keep only the evidence that the new view does not answer."""
        assert self.view is not None
        fabric = self._fabric.without(*self.view.failures)
        self._dead = {server: why for server, why in self._dead.items() if server in self.view.members}
        self._forget(lambda each: not is_open(fabric, each))

    def _forget(self, past: Callable[[Suspicion], bool]) -> None:
        """Drop suspicions; without any evidence left there is nothing to act on."""
        self._suspicions = {key: each for key, each in self._suspicions.items() if not past(each)}
        if not self._dead and not self._suspicions and self.state == "steady":
            self._fresh, self._act_at = False, None

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
                late = promised < self._epoch or self.state not in ("freezing", "proposing")
                self._epoch = max(self._epoch, promised)
                return [] if late else self._change(now)
            case msg.Deposed(_, term):
                return self._deposed(term)
            case msg.Suspect():
                return self._suspected(message, now) if server in self.members else []
            case msg.Withdraw(observer, peer, level):
                self._forget(lambda each: (each.observer, each.peer, each.level) == (observer, peer, level))
                return []
            case msg.Healthy(observer, peer, level):
                self._trusted.add((observer, peer, level))
                return self._heal(now)
            case msg.Relapsed(observer, peer, level):
                self._trusted.discard((observer, peer, level))
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
        """It was asked to go: nothing of it is in the step that comes, the others need not wait to find out."""
        self._roster.drop(server)
        if server not in self.members:
            return self._evict([server])
        self._dead.setdefault(server, f"it leaves: {why}")
        return self._gathered(now) if self.state == "gathering" else self._note(now, 0.0, 0.0)

    def _ended(self, server: int, outcome: str, error: str, now: float) -> list[Instruction]:
        self.outcomes[server] = outcome
        if outcome == "failed" and server in self.contributors:
            return self._abort("training", error, server)
        if outcome == "failed" and server in self.members:  # a learner is the loss of nobody
            return self._leaves(server, error, now)
        if server in self._newcomers and self.state in ("freezing", "proposing"):
            self._roster.drop(server)
            return self._change(now)
        return self._check_done()

    def _check_done(self) -> list[Instruction]:
        if self.state != "steady" or any(self.outcomes.get(server) != "done" for server in self.contributors):
            return []
        return self._finish()

    def _finish(self) -> list[Instruction]:
        self.state = "stopped"
        self._farewell = shutdown = msg.Shutdown(self.term)
        return [*(Post(server, shutdown) for server in self._fabric.servers), Finished(None)]

    def _deposed(self, term: int) -> list[Instruction]:
        if term <= self.term:
            return []
        self.state = "stopped"
        self._farewell = None
        return [Finished(None, deposed=True)]

    def _abort(self, kind: str, text: str, server: int = -1) -> list[Instruction]:
        self.state = "stopped"
        self._farewell = abort = msg.Abort(self.term, kind, text, server)
        return [*(Post(server, abort) for server in self._fabric.servers), Finished(abort)]


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
    "decide",
]
