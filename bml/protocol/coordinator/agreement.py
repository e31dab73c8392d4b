"""How a coordinator brings all servers to one view: it asks, proposes, and says when the view is in force.

State table:

    state      event                                    becomes    and
    ---------  ---------------------------------------  ---------  -----------------------------------
    gathering  every server of the newest view has      steady     goes on with that view, or changes
               answered Who, or is known to be gone                it if any is missing or frozen
    steady     evidence, its window is over             freezing   diagnoses; Freeze(epoch+1) to the
                                                                   survivors
    freezing   every Status is there                    proposing  decides COMMIT or RETRY; Propose
    proposing  every Accepted is there                  steady     Install; Evict to the others
    freezing,  more evidence, or no answer in time      freezing   again, with a higher epoch
    proposing
    any        too few servers, a training error        stopped    Abort to all
    steady     a joiner waits, a learner has caught up  freezing   as after evidence: the next view has it
    steady     a NIC is slow, or is so no more          freezing   as after evidence: the next view has its
                                                                   rate
    steady     every contributor is done                stopped    Shutdown to all
    any        a change, all left in it are done        stopped    Shutdown to them
    any        Deposed: a successor is at work          stopped    sends nothing more

A new coordinator starts in `gathering` too: start-up and takeover are one path. No server is evicted before a
view without it is in force: if the members of that view turn out to be dead, the other servers go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from bml.faults import Suspicion, diagnose
from bml.protocol.coordinator.ballot import Ballot
from bml.protocol.coordinator.decision import counts_as_alive, epoch_of
from bml.protocol.coordinator.ending import Ending
from bml.protocol.coordinator.events import Instruction, Post
from bml.protocol.coordinator.evidence import Findings
from bml.protocol.coordinator.joiners import Joiners
from bml.protocol.coordinator.known import KnownViews
from bml.protocol.coordinator.next_view import derive_next_view
from bml.protocol.coordinator.rates import Rates
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.topology import Fabric


class Agreement:
    """See the module's text; arguments as of bml.protocol.coordinator.core.Coordinator.

    `statuses` are the answers while it gathers, `ballot` is the next view while it is frozen or proposed.
    A server that others suspect has to answer by `answer_by`, the rest by `last_answer_by`: a server that
    nobody misses is busy, or all that would miss it are silent, too.
    """

    def __init__(
        self,
        fabric: Fabric,
        term: int,
        timeouts: Timeouts,
        min_servers: int | None,
        now: float,
        absent: Iterable[int],
        adapts: bool,
    ):
        self.term = term
        self.state = "gathering"
        self.statuses: dict[int, msg.Status] = {}
        self.ballot: Ballot | None = None
        self.reason = ""
        self.answer_by = self.last_answer_by = now + timeouts.start_s
        self._asked_at = self._awake_at = now
        self._latest_by = self.last_answer_by  # for pauses of the coordinator, however many, until then
        self._back_at = -inf
        self._pardoned = False
        self.findings = Findings(timeouts, now)
        self.rates = Rates(fabric, timeouts)
        self.joiners = Joiners()
        self.ending = Ending(term, fabric.servers)
        self._fabric = fabric
        self._absent = frozenset(absent)
        self._adapts = adapts
        self._timeouts = timeouts
        first = (server for server in fabric.servers if server not in self._absent)
        self.known = KnownViews(tuple(first), min_servers)

    @property
    def awaited(self) -> list[int]:
        """The servers whose answers are needed to go on."""
        if self.ballot is not None:
            return self.ballot.silent
        if self.state == "gathering":
            return [server for server in self.known.members if server not in self.statuses]
        return []

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, a Tick is due."""
        if self.overdue(now):
            return now
        due = [now + self._timeouts.heartbeat_s] if self.state != "stopped" else []
        judged_at = None if self._waits or self.findings.fresh else self.rates.act_at
        due += [at for at in (self.findings.act_at, judged_at) if at is not None]
        return min(due, default=now + 3600)

    @property
    def _waits(self) -> bool:
        return self.state in ("gathering", "freezing", "proposing")

    def forgive_own_pause(self, now: float) -> None:
        """The coordinator runs: if it paused, extend the time in which servers have to answer."""
        gap_s, self._awake_at = now - self._awake_at, now
        late_s, was_stopped = gap_s - self._timeouts.heartbeat_s, gap_s > self._timeouts.detect_s
        if was_stopped:
            self._back_at = now
        if not self._waits or late_s <= 0:
            return
        if was_stopped and not self._pardoned:
            # All processes may have been stopped, and none can have answered yet; once for each question.
            self._pardoned = True
            self._latest_by = max(self._latest_by, now + self._timeouts.answer_s)
            self.last_answer_by = max(self.last_answer_by, self._latest_by)
        self.answer_by = min(self.answer_by + (gap_s if was_stopped else late_s), self._latest_by)

    def has_run_for_s(self, now: float) -> float:
        """For how many seconds the coordinator has run without a pause."""
        return now - self._back_at

    def was_away(self, now: float) -> bool:
        """Whether the messages that it reads now may be older than what it said last.

        Servers may have waited for the rest of that, and suspect those that still do.
        """
        return self.has_run_for_s(now) <= self._timeouts.heartbeat_s

    def overdue(self, now: float) -> dict[int, str]:
        """The servers whose answers are not awaited any longer, and what is known of them.

        To be asked at a Tick: messages that came in while the coordinator did not run have been read by then.
        """
        if not self._waits or now < self.answer_by:
            return {}
        late = [server for server in self.awaited if server not in self.findings.gone]
        newcomers = self.ballot.newcomers if self.ballot else ()
        if now < self.last_answer_by:
            # Those that the view excludes may be cut off; they count only where all members are silent.
            observers = self.ballot.members if self.ballot and self.ballot.answered else self._fabric.servers
            late = [each for each in late if self.findings.suspects(each, observers) or each in newcomers]
        if now < self._asked_at + self._timeouts.hold_s:
            late = [each for each in late if not self.findings.is_held(each, now)]
        what = (
            "did not appear" if self.ballot is None else f"gave no answer within {now - self._asked_at:.3g} s"
        )
        return dict.fromkeys(late, what)

    def called_for_s(self, server: int, now: float) -> float:
        """For how long a server is called without an answer before it counts as gone."""
        members, findings = self.known.members, self.findings
        is_missed = findings.suspects(server, members) and not findings.is_held(server, now)
        return self._timeouts.connect_s if server not in members or is_missed else self._timeouts.hold_s

    def _await(self, now: float, for_s: float) -> None:
        """Answers are due from now on."""
        self._asked_at = self._awake_at = now
        self._pardoned = False
        self.answer_by, self.last_answer_by = now + for_s, now + max(for_s, self._timeouts.hold_s)
        self._latest_by = now + max(for_s, self._timeouts.longest_answer_s)

    def missed_by(self, server: int) -> list[Instruction]:
        """The messages that a server which reconnects may have missed; Evict answers its Status again."""
        returned = self.returned([server])
        if self.ballot is None or server not in self.ballot.members:
            return returned
        return [*returned, Post(server, self.ballot.question(self.term))]

    # --- gathering: start-up and takeover --------------------------------------------------------

    def gathered(self, now: float) -> list[Instruction]:
        """One more has answered, or is known to be gone: go on, once that is so of all."""
        gone = self.findings.gone
        if any(server not in gone for server in self.awaited):
            return []
        if self.known.view is None and gone and self.known.min_servers is None:
            who = "; ".join(f"server {server} {what}" for server, what in sorted(gone.items()))
            return self.abort("start", f"cannot start: {who}")
        if self.known.view is not None:
            self.findings.forget_gone(self.known.members)
        failed = [
            server for server in self.known.contributors if self.ending.outcomes.get(server) == "failed"
        ]
        if failed:
            return self.abort("training", self.statuses[failed[0]].error, failed[0])
        here = (status for server, status in self.statuses.items() if server in self.known.members)
        settled = all(self.known.has_in_force(status) for status in here)
        if self.known.view is not None and settled and not self.findings.gone:
            self.state = "steady"
            if self.findings.suspected or self.findings.stale:
                self.findings.note(now, self._timeouts.silence_window_s)
            return [*self.evict(self._fabric.servers), *self.check_done(), *self.admit_or_promote(now)]
        self.findings.since_s = now
        return self.change(now)

    def postponed(self, now: float) -> float | None:
        """Until when to wait before acting on the evidence, as some of it may be withdrawn; None: act.

        A silence that was noticed just now may be over with the next heartbeat. If fewer failures explain all
        other evidence, that heartbeat is awaited, lest a server that has only missed some is evicted together
        with a dead one.
        """
        damaged = self._fabric.without(*(self.known.view.failures if self.known.view else ()))
        evidence, older = self.findings.evidence(damaged), self.findings.evidence(damaged, now)
        until_s = self.findings.since_s + 2 * self._timeouts.silence_window_s
        if now >= until_s or len(older.suspicions) == len(evidence.suspicions):
            return None
        more = len(diagnose(damaged, evidence).failures) > len(diagnose(damaged, older).failures)
        return min(until_s, now + self._timeouts.heartbeat_s) if more else None

    def _is_void(self, suspicion: Suspicion) -> bool:
        """Whether the peer was silent because the view had not reached it: it is alive, and waits for it."""
        known = self.ballot.statuses if self.ballot else self.statuses
        status = known.get(suspicion.peer)
        outside = status is not None and epoch_of(status.installed) < epoch_of(self.known.view)
        return suspicion.peer != suspicion.observer and outside

    def excludes(self, suspect: msg.Suspect) -> bool:
        """Whether the view that is being agreed on, or else the one in force, excludes the suspected part.

        A server that acts on a view before the others closes its connections over a NIC that the view
        excludes, and the others see that in the view before.
        """
        view = self.ballot.next if self.ballot is not None else self.known.view
        return view is not None and not counts_as_alive(self._fabric.without(*view.failures), suspect)

    def take_over(self, now: float) -> None:
        """There is a view: its servers run, and need no time to start."""
        start_by = self.last_answer_by
        self._await(now, self._timeouts.answer_s)
        self.answer_by = min(self.answer_by, start_by)
        self.last_answer_by = min(self.last_answer_by, start_by)
        self._latest_by = min(self._latest_by, start_by)

    # --- changing the view -----------------------------------------------------------------------

    def change(self, now: float) -> list[Instruction]:
        """Diagnose all evidence and freeze the survivors."""
        self.findings.forget(self._is_void)
        self.settle_if_steady()
        next_ = derive_next_view(
            self._fabric, self.known.view, self._absent, self.findings, self.joiners, self.rates
        )
        if next_.members and self.ending.done(next_.contributors):
            return self._finish()  # the servers that are left need no view
        shortage = self.known.shortage(next_.contributors)
        if shortage:
            return self.abort("too-few", f"{shortage}. {next_.reason}")
        for server in next_.newcomers:
            self.ending.comes_again(server)
        self.reason = next_.news or self.reason or ("new coordinator" if self.known.view else "start")
        self.known.epoch += 1
        view = next_.view(self.known.epoch, self.reason, self.findings.noticed_s(now))
        return self._freeze(Ballot(view, next_.newcomers), now)

    def _freeze(self, ballot: Ballot, now: float) -> list[Instruction]:
        self.ballot = ballot
        self.statuses = {}
        self.state = "freezing"
        self.findings.act_at = None
        self.findings.stale.clear()  # the servers that are asked now will get a view
        return self._ask(ballot, now)

    def _ask(self, ballot: Ballot, now: float) -> list[Instruction]:
        answer_s = max(self._timeouts.answer_s, self._timeouts.patience_s(self.known.committed))
        self._await(now, answer_s)
        question = ballot.question(self.term)
        return [Post(server, question) for server in ballot.members]

    def admit_or_promote(self, now: float) -> list[Instruction]:
        """Let servers in, and let learners contribute or get a later state, once all else is well."""
        if self.state != "steady" or self.findings.fresh:
            return []
        view, joiners = self.known.view, self.joiners
        news = joiners.admitted(view) or joiners.promoted(view) or joiners.behind(view)
        return self.change(now) if news else []

    def heal(self, now: float) -> list[Instruction]:
        """Use parts again that have worked for long enough, unless there is other evidence to act on."""
        findings = self.findings
        if self.state != "steady" or self.known.view is None or findings.fresh or not findings.trusted:
            return []
        return self.change(now) if findings.heal(self._fabric, self.known.view.failures) else []

    def measured(self, message: msg.Measured, now: float) -> None:
        """A server has measured what its connections carry; only in the view in force that says something."""
        if self._adapts and self.state == "steady" and message.epoch == epoch_of(self.known.view):
            self.rates.measured(message, now)

    def adjust(self, now: float) -> list[Instruction]:
        """Plan with other rates, if they have changed, unless there is other evidence to act on."""
        if self.state != "steady" or self.known.view is None or self.findings.fresh:
            return []
        return self.change(now) if self.rates.judge(self.known.view, now) else []

    def evict(self, servers: Iterable[int]) -> list[Instruction]:
        """Tell servers that are in no view, now and whenever they appear again: they would wait for ever."""
        asked = self.ballot.members if self.ballot else ()
        members = {*self.known.members, *asked}
        evict = msg.Evict(self.term, self.known.epoch, self.reason or "a view without it is in force")
        out = (server for server in servers if server not in members and not self.joiners.waits(server))
        return [Post(server, evict) for server in out]

    def propose(self, ballot: Ballot, now: float) -> list[Instruction]:
        """Every survivor has reported: COMMIT or RETRY."""
        view = ballot.decide(self.known.view, self.known.abandoned)
        shortage = self.known.shortage(view.contributors)  # a learner may have fallen behind
        if shortage:
            return self.abort("too-few", f"{shortage}. {view.reason}")
        self.known.propose(view)
        self.state = "proposing"
        return self._ask(ballot, now)

    def accept(self, message: msg.Accepted, now: float) -> list[Instruction]:
        """A member has accepted the proposal: once all have, it is in force."""
        ballot = self.ballot
        if ballot is None or ballot.proposal is None or message.epoch != self.known.epoch:
            return []
        ballot.accepted.add(message.server)
        if ballot.silent:
            return []
        self.findings.forget(self._is_void)  # said before the view had reached those peers
        view, self.ballot = ballot.proposal, None
        self.known.put_in_force(view)
        self.state = "steady"
        self.joiners.settle(view)
        self.rates.installed(view)
        self.findings.answered(view, self._fabric.without(*view.failures))
        self.settle_if_steady()
        out: list[Instruction] = [
            Post(server, msg.Install(self.term, self.known.epoch)) for server in view.members
        ]
        out += self.evict(self._fabric.servers)
        self.ending.forget_others(view.members)
        return out + self.returned(view.members) + self.check_done() + self.admit_or_promote(now)

    def returned(self, servers: Iterable[int]) -> list[Instruction]:
        """Tell these of a contributor that comes to no more steps; one that leaves makes room for them."""
        present = [server for server in self.known.contributors if server not in self.findings.gone]
        return self.ending.tell_returned(servers, present)

    def settle_if_steady(self) -> None:
        """Forget the time to act if no evidence is left."""
        if self.state == "steady":
            self.findings.settle()

    # --- the end ---------------------------------------------------------------------------------

    def check_done(self) -> list[Instruction]:
        """End the job if all contributors are done."""
        if self.state != "steady" or not self.ending.done(self.known.contributors):
            return []
        return self._finish()

    def _finish(self) -> list[Instruction]:
        self.stop()
        return self.ending.finish()

    def abort(self, kind: str, text: str, server: int = -1) -> list[Instruction]:
        """The job cannot go on; see messages.ABORT_KINDS."""
        self.stop()
        return self.ending.abort(kind, text, server)

    def stop(self) -> None:
        """Nothing is agreed on any more."""
        self.state, self.ballot = "stopped", None
