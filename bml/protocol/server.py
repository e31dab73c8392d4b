"""One server's core: engine, barrier, membership and detector behind one `handle(event, now)`.

Life of a step on this server:

    idle       -- the user submits, epoch is current  -->  running
    running    -- all outputs final                   -->  complete   (enters the barrier)
    complete   -- every token is there                -->  committed  (the result goes to the user)
    running, complete
               -- Freeze                              -->  frozen     (reports where it stands)
    frozen     -- Install, view.commit >= step        -->  committed  (it was complete, so were all)
               -- Install, view.commit <  step        -->  idle       (the user prepares it again)

The user's contribution is only read, so a step can be tried as often as the fabric breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bml.errors import Evicted, StepMismatch, job_error
from bml.protocol import messages as msg
from bml.protocol.barrier import Barrier, Token, barrier_phases
from bml.protocol.direct import DirectEngine, Stage, direct_phases
from bml.protocol.engine import Place, Send, Stamp
from bml.protocol.events import (
    Commit,
    Control,
    Differs,
    Ended,
    Event,
    Fence,
    Gathered,
    Installed,
    Instruction,
    Leave,
    Links,
    Open,
    OwnNicLost,
    PeerLost,
    Resume,
    Retry,
    SendText,
    Stop,
    Submit,
    Summed,
    Tell,
    Tick,
    Verdict,
)
from bml.protocol.exchange import AnyEngine, engine_for
from bml.protocol.frame import MAX_TEXT_NBYTES, FrameError, Header, Kind
from bml.protocol.member import Member
from bml.protocol.timeouts import Timeouts
from bml.protocol.watch import Watch
from bml.schedule import AnyProgram, DirectProgram
from topology import Fabric
from topology.errors import BmlError, FabricError, InvariantError

Planner = Callable[[Fabric, int], AnyProgram]

_PROGRESS_EVERY_S = 0.1
_TEXTS_KEPT = 8
_TOKEN_PRIORITY = -1  # before all slices, which count from 0


@dataclass
class _Step:
    """The step that is being synchronised."""

    submit: Submit
    epoch: int
    contributors: tuple[int, ...]
    engine: AnyEngine
    barrier: Barrier
    entered: bool = False


@dataclass(frozen=True)
class ViewRecord:
    """A view as this server lived through it; times are the shell's clock, in seconds.

    `recover_s` runs from the freeze to the first commit afterwards, None until there was one.
    """

    view: msg.View
    frozen_at_s: float
    installed_at_s: float
    recover_s: float | None = None


class ServerCore:
    """See the module's text. `planner(fabric, server)` compiles this server's program for a view."""

    def __init__(
        self,
        server: int,
        fabric: Fabric,
        planner: Planner,
        timeouts: Timeouts,
        slice_nbytes: int,
        now: float,
    ):
        self.server = server
        self.timeouts = timeouts
        self.committed = 0
        self.views: list[ViewRecord] = []
        self._base = fabric
        self._planner = planner
        self._slice_nbytes = slice_nbytes
        self._member = Member(server)
        self._watch = Watch(server, fabric, timeouts.detect_s, now)
        self._program: AnyProgram | None = None
        self._phases = barrier_phases(fabric, server)
        self._step: _Step | None = None
        self._waiting: int | None = None
        self._proven_epoch = 0
        self._conflict: BmlError | None = None
        self._error: BmlError | None = None
        self._outcome = Ended("")
        self._term = -1
        self._texts: dict[tuple[int, int], str] = {}
        self._announced: int | None = None
        self._frozen_at = now
        self._progress_at = now
        self._needs_view_since: float | None = None

    # --- what the shell may look at --------------------------------------------------------------

    @property
    def view(self) -> msg.View | None:
        """The installed view."""
        return self._member.installed

    @property
    def epoch(self) -> int:
        """Epoch of the installed view, 0 before the first."""
        return self._member.epoch

    @property
    def step(self) -> int:
        """The step that is being synchronised, else the next one."""
        return self.committed + 1

    @property
    def progress(self) -> float | None:
        """How far the current step is on this server, 0 to 1; None when there is none."""
        return self._step.engine.progress if self._step else None

    @property
    def signature(self) -> int:
        """Hash of what the user called for the current step."""
        return self._step.submit.signature if self._step else 0

    @property
    def phase(self) -> str:
        """Where this server is, as fault plans call it (faults.notation); "" when nothing goes on.

        A result that arrives does not show here: `reduce` lasts until all outputs are final.
        """
        if self._error:
            return ""
        if self._member.frozen:
            return "recovery" if self.view else "start" if self._term >= 0 else ""
        if self._outcome.outcome:
            return "shutdown"
        if self._step is None or not self._step.engine.handled:
            return "compute"
        return "complete" if self._step.entered else "reduce"

    @property
    def suspicions(self) -> tuple[msg.Suspect, ...]:
        """What this server suspects."""
        return self._watch.suspicions

    def waits_for(self) -> str:
        """What this server is waiting for, in words."""
        if self._error:
            return f"nothing: stopped ({self._error})"
        if self._member.frozen:
            return f"the coordinator's view after epoch {self.epoch}"
        if self._step is None:
            return f"the training function to bring step {self.step}"
        if not self._step.entered:
            return f"slices of step {self.step}: {self._step.engine.remaining} elements are not final"
        return f"barrier tokens of step {self.step} from servers {self._step.barrier.missing}"

    @property
    def urgent(self) -> bool:
        """Whether a Tick is due at once, whatever the time."""
        proven = self._may_install(self._proven_epoch)
        return proven or (self._conflict is not None and self._error is None)

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, a Tick is due."""
        return self._watch.next_deadline(now)

    # --- events ----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """React to an event at time `now` (seconds, any origin, never going back)."""
        match event:
            case Tick():
                return self._tick(now)
            case Submit():
                return self._submit(event, now)
            case Control(message):
                return self._control(message, now)
            case PeerLost():
                return self._peer_lost(event)
            case OwnNicLost():
                return self._own_nic_lost(event)
            case Ended():
                self._outcome = event
                return [Tell(msg.Ended(self.server, event.outcome, event.error))]
            case Gathered() | Summed() | Differs():
                return self.met(event, now)

    def heard(self, peer: int, level: int, now: float) -> None:
        """A sign of life of (peer, level): a heartbeat or any byte."""
        self._watch.heard(peer, level, now)

    def admit(self, peer: int, header: Header) -> Place | Verdict:
        """Where the payload of a frame belongs, or what else to do with it.

        Raises FrameError when no such frame can be: its connection is to be closed.
        """
        if header.epoch > self.epoch:
            if self._member.may_install(header.epoch):
                self._proven_epoch = header.epoch  # the next Tick installs it
            return Verdict.WAIT
        if header.epoch < self.epoch or self._member.frozen or header.step <= self.committed:
            return Verdict.DROP
        if header.kind == Kind.DESCRIBE:
            return Verdict.TEXT
        if self._step is None or header.step != self._step.submit.step:
            return Verdict.WAIT
        if header.signature != self._step.submit.signature:
            theirs = self._texts.get((header.origin, header.signature), "something else")
            self._conflict = self._mismatch(self._step.submit, header.origin, theirs)
            return Verdict.DROP
        if header.kind == Kind.TOKEN:
            return Verdict.TOKEN
        if header.nbytes != (header.stop - header.start) * self._step.submit.itemsize:
            raise FrameError(f"{header.nbytes} bytes cannot be elements {header.start}:{header.stop}")
        return self._step.engine.place(header.kind, header.origin, header.dest, header.start, header.stop)

    def received(self, peer: int, header: Header, text: str, now: float) -> list[Instruction]:
        """An admitted frame is complete (its payload is where `admit` said, or in `text`)."""
        if header.kind == Kind.DESCRIBE:
            while len(self._texts) >= _TEXTS_KEPT * max(1, len(self._watch.links)):
                self._texts.pop(next(iter(self._texts)))
            self._texts[header.origin, header.signature] = text
            return []
        step = self._step
        ours = step is not None and (header.step, header.epoch) == (step.submit.step, self.epoch)
        if step is None or not ours or self._member.frozen:
            return []  # its epoch ended between admission and the last byte
        if header.kind == Kind.TOKEN:
            return self._pass_barrier(step.barrier.token(peer, header.start), now)
        done: list[Instruction] = [
            *step.engine.received(header.kind, header.origin, header.dest, header.start, header.stop)
        ]
        return done + self._enter_if_complete(now)

    # --- a step ----------------------------------------------------------------------------------

    def _submit(self, event: Submit, now: float) -> list[Instruction]:
        if self._error:
            return [Stop(self._error)]
        if event.step != self.step:
            raise InvariantError(f"server {self.server}: step {event.step} submitted, {self.step} is next")
        if self._member.frozen:
            self._waiting = event.step
            return []
        if event.epoch != self.epoch:
            return [Retry(event.step, self.epoch)]
        assert self.view is not None
        assert self._program is not None
        stamp = Stamp(self.epoch, event.step, event.signature, event.itemsize)
        slice_elements = max(1, self._slice_nbytes // event.itemsize)
        engine = engine_for(self._program, stamp, event.n_elements, slice_elements)
        self._step = _Step(event, self.epoch, self.view.members, engine, Barrier(self._phases))
        done: list[Instruction] = [Open(event.step, engine.scratch_elements), *self._announce(event)]
        done += engine.start()
        done += self._enter_if_complete(now)
        return [*done, Resume()]

    def _announce(self, event: Submit) -> Iterable[Instruction]:
        """Tell the neighbours what the user called, whenever it is not what he called before."""
        if self._announced == event.signature or isinstance(self._program, DirectProgram):
            return []
        self._announced = event.signature
        text = event.text.encode()[:MAX_TEXT_NBYTES]
        done: list[Instruction] = []
        for peer, level in sorted(self._watch.links):
            header = self._header(event, Kind.DESCRIBE, peer, 0, len(text))
            done.append(SendText(peer, level, header, text))
        return done

    def _header(self, event: Submit, kind: Kind, peer: int, start: int, nbytes: int) -> Header:
        stop = start + nbytes if kind == Kind.DESCRIBE else 0
        return Header(kind, self.epoch, event.step, self.server, peer, event.signature, start, stop, nbytes)

    def _enter_if_complete(self, now: float) -> list[Instruction]:
        step = self._step
        if step is None or step.entered or not step.engine.complete:
            return []
        step.entered = True
        return self._pass_barrier(step.barrier.enter(), now)

    def _pass_barrier(self, tokens: list[Token], now: float) -> list[Instruction]:
        assert self._step is not None
        submit = self._step.submit
        done: list[Instruction] = [
            Send(peer, level, self._header(submit, Kind.TOKEN, peer, round_, 0), None, _TOKEN_PRIORITY)
            for peer, level, round_ in tokens
        ]
        return done + self._commit(now) if self._step.barrier.passed else done

    def _commit(self, now: float) -> list[Instruction]:
        step = self._step
        assert step is not None
        self._step = None
        self.committed = step.submit.step
        if self.views and self.views[-1].recover_s is None:
            last = self.views[-1]
            self.views[-1] = replace(last, recover_s=now - last.frozen_at_s)
        done: list[Instruction] = [Commit(self.committed, step.epoch, step.contributors)]
        if now - self._progress_at >= _PROGRESS_EVERY_S:
            self._progress_at = now
            done.append(Tell(msg.Progress(self.server, self.committed)))
        return done

    def _mismatch(self, submit: Submit, origin: int, theirs: str) -> BmlError:
        return StepMismatch(
            f"step {submit.step}: server {origin} called {theirs}, but server {self.server} called "
            f"{submit.text}; every server must make the same calls with the same shapes and dtypes"
        )

    # --- a step over shared memory -----------------------------------------------------------------

    def met(self, event: Gathered | Summed | Differs, now: float) -> list[Instruction]:
        """What `handle` does with these."""
        step = self._step
        if step is None or event.step != step.submit.step or event.epoch != step.epoch:
            return []  # its epoch is over
        engine = step.engine
        if self._member.frozen or step.epoch != self.epoch or not isinstance(engine, DirectEngine):
            return []
        if isinstance(event, Differs):
            self._conflict = self._mismatch(step.submit, event.origin, event.text)
            return self._tick(now)
        if isinstance(event, Gathered) and event.stage is Stage.COMPLETE:
            if not step.entered:
                raise InvariantError(f"server {self.server} passes the barrier of {event} incomplete")
            return self._commit(now)
        todo = engine.summed() if isinstance(event, Summed) else engine.gathered(event.stage)
        return [*todo, *self._enter_if_complete(now)]

    # --- time ------------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Instruction]:
        if self._orphaned(now):
            return self._stop(
                FabricError(
                    f"server {self.server} has waited {self.timeouts.orphan_s:g} s for a view after epoch "
                    f"{self.epoch}: is there a coordinator? It waits for {self.waits_for()}"
                )
            )
        done: list[Instruction] = []
        if self._conflict and not self._error:
            self._error = self._conflict
            done.append(Stop(self._error))
        if self._may_install(self._proven_epoch):
            done += self._install(now)
        return done + self._watch.tick(now)

    def _orphaned(self, now: float) -> bool:
        """Whether a coordinator has been needed, and has brought no view, for too long."""
        if self._error is not None or not (self._member.frozen or self._watch.suspects):
            self._needs_view_since = None
            return False
        self._needs_view_since = now if self._needs_view_since is None else self._needs_view_since
        return now - self._needs_view_since > self.timeouts.orphan_s

    def _peer_lost(self, event: PeerLost) -> list[Instruction]:
        if (event.peer, event.level) not in self._watch.links or self._error:
            return []
        return [self._watch.suspect(event.peer, event.level, "reset", 0.0, event.why)]

    def _own_nic_lost(self, event: OwnNicLost) -> list[Instruction]:
        return [self._watch.suspect(self.server, event.level, "own-nic", 0.0, event.why)]

    # --- membership ------------------------------------------------------------------------------

    def _control(self, message: msg.ToServer, now: float) -> list[Instruction]:
        term = getattr(message, "term", self._term)
        if term < self._term:
            return [Tell(msg.Deposed(self.server, self._term))]  # its successor has asked already
        self._term = term
        match message:
            case msg.Who():
                return [Tell(self._status(term, 0)), *self._watch.all_again()]
            case msg.Freeze():
                return self._freeze(message, now)
            case msg.Propose():
                return [Tell(self._member.propose(message))]
            case msg.Install(_, epoch):
                return self._install(now) if self._may_install(epoch) else []
            case msg.Evict(_, epoch, reason):
                return self._stop(Evicted(f"server {self.server} is out of view {epoch}: {reason}"))
            case msg.Abort(_, kind, text, server):
                return self._stop(job_error(kind, text, server))
            case msg.Shutdown():
                return self._shut_down()
            case msg.Inject():
                return []  # for the shell alone

    def _shut_down(self) -> list[Instruction]:
        if self._outcome.outcome or self._error:
            return [Leave()]
        return self._stop(Evicted(f"server {self.server} is out: the others ended the job without it"))

    def _may_install(self, epoch: int) -> bool:
        return self._error is None and self._member.may_install(epoch)

    def _status(self, term: int, epoch: int) -> msg.Status:
        step = self._step
        complete = step.submit.step if step and step.engine.complete else -1
        ended = self._outcome
        return self._member.status(term, epoch, self.committed, complete, ended.outcome, ended.error)

    def _freeze(self, message: msg.Freeze, now: float) -> list[Instruction]:
        if self._error:
            return []
        was_frozen = self._member.frozen
        refused = self._member.freeze(message)
        if refused:
            return [Tell(refused)]
        if not was_frozen:
            self._frozen_at = now
        return [Fence(), Tell(self._status(message.term, message.epoch))]

    def _stop(self, error: BmlError) -> list[Instruction]:
        if self._error:
            return []
        self._error = error
        self._step = None
        self._member.frozen = True
        return [Fence(), Links(frozenset()), Stop(error)]

    def _install(self, now: float) -> list[Instruction]:
        view = self._member.install()
        fabric = self._base.without(*view.failures)
        self._program = self._planner(fabric, self.server)
        if isinstance(self._program, DirectProgram):
            self._phases = direct_phases(self._program)
        else:
            self._phases = barrier_phases(fabric, self.server)
        links = frozenset(
            (peer, level) for level in range(fabric.levels) for peer in fabric.neighbours(self.server, level)
        )
        self._watch.set_view(view, links, now)
        self._announced = None
        self._needs_view_since = None
        self.views.append(ViewRecord(view, self._frozen_at, now, recover_s=None))
        return [Installed(view), Links(links), *self._settle_step(view, now), Resume()]

    def _settle_step(self, view: msg.View, now: float) -> list[Instruction]:
        """Commit or retry the step that the old view was in the middle of."""
        step, self._waiting, waiting = self._step, None, self._waiting
        if step is None:
            if view.commit > self.committed:
                raise InvariantError(
                    f"view {view.epoch} commits step {view.commit}, "
                    f"server {self.server} stands at {self.committed}"
                )
            return [] if waiting is None else [Retry(waiting, view.epoch)]
        if view.commit >= step.submit.step:
            if not step.engine.complete:
                raise InvariantError(
                    f"view {view.epoch} commits step {view.commit}, incomplete on {self.server}"
                )
            return self._commit(now)
        self._step = None
        return [Retry(step.submit.step, view.epoch)]


__all__ = ["Leave", "Planner", "ServerCore", "ViewRecord"]
