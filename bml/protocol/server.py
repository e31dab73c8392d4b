"""One server's core: engine, barrier, membership and detector behind one `handle(event, now)`.

Life of a step on this server:

    idle       -- the user submits, epoch is current  -->  running
    running    -- all outputs final                   -->  complete   (enters the barrier)
    complete   -- every token is there                -->  committed  (the result goes to the user)
    running, complete
               -- Freeze                              -->  frozen     (reports where it stands)
    frozen     -- Install, view.commit >= step        -->  committed  (it was complete, so were all)
               -- Install, view.commit <  step        -->  idle       (the user prepares it again)

The user's contribution is only read, so a step can be tried as often as the fabric breaks. A server in a
later life joins: it follows the steps first, see learner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bml.errors import Evicted, StepMismatch, job_error
from bml.protocol import messages as msg
from bml.protocol.barrier import Barrier, Token, barrier_phases
from bml.protocol.direct import DirectEngine, Stage, direct_phases
from bml.protocol.engine import Buffer, Place, Send, Stamp
from bml.protocol.events import (
    Called,
    Commit,
    Control,
    Differs,
    Ended,
    Event,
    Fence,
    Follow,
    Gathered,
    Give,
    Gives,
    Go,
    Installed,
    Instruction,
    Keep,
    Leave,
    Links,
    Open,
    OwnNicLost,
    PeerLost,
    Prepare,
    Prepared,
    Replay,
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
from bml.protocol.exchange import AnyEngine, Engines
from bml.protocol.frame import FrameError, Header, Kind
from bml.protocol.learner import Learner
from bml.protocol.member import Member
from bml.protocol.spans import Spans, merged, missing, placed, size
from bml.protocol.timeouts import Timeouts
from bml.protocol.transfer import Giving, giving
from bml.protocol.watch import Watch
from bml.schedule import AnyPrograms
from topology import Fabric
from topology.errors import BmlError, FabricError, InvariantError

Planner = Callable[[Fabric, int], AnyPrograms]

_PROGRESS_EVERY_S = 0.1
_TEXTS_KEPT = 8
_VIEWS_KEPT = 1024
_TOKEN_PRIORITY = -1  # before all slices, which count from 0
_STATE_NBYTES = 16 << 20  # how much a joiner's state is thought to be, to cut it: nobody knows before
_STATE_PRIORITY = 1 << 30  # a joiner's state moves when no step needs the link


@dataclass
class _Step:
    """The step that is being synchronised."""

    submit: Submit
    epoch: int
    contributors: tuple[int, ...]
    engine: AnyEngine
    barrier: Barrier
    stamp: tuple[int, int]
    """(epoch, step), as all its frames have it."""
    follows: bool
    itemsize: int
    left: Spans
    """The elements that this try is about: all, unless others were final before."""
    entered: bool = False

    @property
    def final(self) -> Spans:
        """The elements that are final."""
        before = missing(self.left, self.submit.n_elements)
        return merged((*before, *placed(self.engine.finals, self.left)))


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
    """See the module's text. `planner(fabric, server)` has this server's programs for a view.

    `slice_nbytes(nbytes)` is the size of the slices, in bytes, of a vector of so many.
    """

    def __init__(
        self,
        server: int,
        fabric: Fabric,
        planner: Planner,
        timeouts: Timeouts,
        slice_nbytes: Callable[[int], int],
        now: float,
        life: msg.Life | None = None,
    ):
        self.server = server
        self.timeouts = timeouts
        self.committed = 0
        self.views: list[ViewRecord] = []
        self._base = fabric
        self._planner = planner
        self._slice_nbytes = slice_nbytes
        self._member = Member(server, life)
        self._learner = Learner(server) if life else None
        self._giving: Giving | None = None
        self._gives = False
        self._goes: msg.Leaves | None = None
        self._watch = Watch(server, fabric, timeouts.detect_s, now)
        self._engines: Engines | None = None
        self._phases = barrier_phases(fabric, server)
        self._step: _Step | None = None
        self._waiting: Submit | None = None
        self._resumes: tuple[Submit, Spans] | None = None
        self._proven_epoch = 0
        self._conflict: BmlError | None = None
        self._error: BmlError | None = None
        self._outcome = Ended("")
        self._term = -1
        self._texts: dict[tuple[int, int], str] = {}
        self._announced: int | None = None
        self._asked = (0, 0)
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
    def programs(self) -> AnyPrograms | None:
        """Those of the installed view, None before the first."""
        return self._engines.programs if self._engines else None

    @property
    def step(self) -> int:
        """The step that is being synchronised, else the next one."""
        return self.committed + 1

    @property
    def follows(self) -> bool:
        """Whether this server is a learner: it takes part without contributing."""
        return self._learner is not None and self._learner.follows

    @property
    def giving(self) -> Giving | None:
        """What this server is to give to joiners at the next boundary after a step of this view."""
        due = self._giving is not None and self.committed > self._giving.commit
        return self._giving if due and not self._member.frozen else None

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
        if self._learner is not None and self.follows and not self._learner.has_state:
            return "transfer"
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
        if self._learner is not None and self.follows and not self._learner.has_state:
            return f"the training state, following step {self.step}"
        if self._step is None:
            return f"the training function to bring step {self.step}"
        if not self._step.entered:
            return f"slices of step {self.step}: {self._step.engine.remaining} elements are not final"
        return f"barrier tokens of step {self.step} from servers {self._step.barrier.missing}"

    @property
    def urgent(self) -> bool:
        """Whether a Tick is due at once, whatever the time."""
        if not self._proven_epoch and self._conflict is None:
            return False  # nearly always
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
            case Follow(submit):
                awaited = self.follows and self._step is None and not self._member.frozen
                ours = (submit.epoch, submit.step) == (self.epoch, self.step)
                return self._begin(submit, now, follows=True) if awaited and ours else []
            case Gives():
                self._gives = True
                return [Tell(msg.Gives(self.server))]
            case Give():
                return self._give(event)
            case Prepared(epoch):
                return self._resume(epoch, now)
            case Go(why):
                self._goes = msg.Leaves(self.server, why)
                return [Tell(self._goes)]
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
        step = self._step
        if step is None or header[1:3] != step.stamp or header.kind > Kind.DOWN or self._member.frozen:
            return self._admit_other(header)
        if header.signature != step.submit.signature:
            return self._conflicts(step.submit, header)
        kind, _, _, origin, dest, _, start, stop, nbytes = header
        if nbytes != (stop - start) * step.itemsize:
            raise FrameError(f"{nbytes} bytes cannot be elements {start}:{stop}")
        return step.engine.place(kind, origin, dest, start, stop)

    def _admit_other(self, header: Header) -> Place | Verdict:
        """`admit` for all but slices of the step that is running."""
        if header.epoch > self.epoch:
            if self._member.may_install(header.epoch):
                self._proven_epoch = header.epoch  # the next Tick installs it
            return Verdict.WAIT
        if header.epoch < self.epoch or self._member.frozen:
            return Verdict.DROP
        if header.kind >= Kind.HEAD:
            return self._admit_state(header)
        if header.step <= self.committed:
            return Verdict.DROP
        if header.kind == Kind.DESCRIBE:
            return Verdict.TEXT
        if self._step is None or header.step != self._step.submit.step:
            return Verdict.WAIT
        if header.signature != self._step.submit.signature:
            return self._conflicts(self._step.submit, header)
        return Verdict.TOKEN

    def _conflicts(self, submit: Submit, header: Header) -> Verdict:
        theirs = self._texts.get((header.origin, header.signature), "something else")
        self._conflict = self._mismatch(submit, header.origin, theirs)
        return Verdict.DROP

    def _admit_state(self, header: Header) -> Place | Verdict:
        if self._learner is None or header.dest != self.server:
            return Verdict.DROP
        if header.kind == Kind.HEAD:
            return Verdict.TEXT
        return Place(Buffer.STATE, header.start) if self._learner.admits(header) else Verdict.DROP

    def received(self, peer: int, header: Header, text: str, now: float) -> list[Instruction]:
        """An admitted frame is complete (its payload is where `admit` said, or in `text`).

        Raises FrameError when it says what cannot be: its connection is to be closed.
        """
        kind, step = header.kind, self._step
        if kind == Kind.DESCRIBE:
            return self._described(header, text, now)
        if kind >= Kind.HEAD:
            return self._state_came(header, text)
        if step is None or header[1:3] != step.stamp or self._member.frozen:
            return []  # its epoch ended between admission and the last byte
        if kind == Kind.TOKEN:
            return self._pass_barrier(step.barrier.token(peer, header.start), now)
        done: list[Instruction] = []
        done += step.engine.received(kind, header.origin, header.dest, header.start, header.stop)
        if step.engine.remaining == 0 and not step.entered:
            done += self._enter_if_complete(now)
        return done

    def _described(self, header: Header, text: str, now: float) -> list[Instruction]:
        while len(self._texts) >= _TEXTS_KEPT * max(1, len(self._watch.links)):
            self._texts.pop(next(iter(self._texts)))
        self._texts[header.origin, header.signature] = text.partition("\n")[2] or text
        ours = header.epoch == self.epoch and not self._member.frozen
        if self._learner is None or not ours or not self.follows:
            return []
        self._learner.called(header, text, self.step)
        return self._follow(now)

    # --- a step ----------------------------------------------------------------------------------

    def _submit(self, event: Submit, now: float) -> list[Instruction]:
        if self._error:
            return [Stop(self._error)]
        if event.step <= self.committed and self._learner is not None:
            return self._replay(event, self._learner)
        if event.step != self.step:
            raise InvariantError(f"server {self.server}: step {event.step} submitted, {self.step} is next")
        if self._member.frozen or self.follows:
            self._waiting = event
            return self._caught_up()
        if event.epoch != self.epoch:
            return [Retry(event.step, self.epoch)]
        return self._begin(event, now)

    def _replay(self, event: Submit, learner: Learner) -> list[Instruction]:
        """Give the user the result of a step that was committed before he came to it."""
        theirs = learner.differs(event)
        if theirs is None:
            return [Replay(event.step)]
        return self._stop(
            StepMismatch(
                f"step {event.step}: the others called {theirs}, but server {self.server}, a joiner, called "
                f"{event.call.text}; it starts where its first session.batches or session.steps begins, "
                "so every call of a step must be made in such a loop"
            )
        )

    def _follow(self, now: float) -> list[Instruction]:
        """A learner takes part in the next step once it knows what is called in it."""
        if self._learner is None or self._step is not None or self._error is not None:
            return []
        event = self._learner.submit(self.step, self.epoch)
        if event is None:
            return []
        if not self.programs or not self.programs.direct:
            return self._begin(event, now, follows=True)
        asked, self._asked = self._asked, (event.epoch, event.step)
        return [Called(event)] if asked != self._asked else []

    def _begin(
        self, event: Submit, now: float, *, follows: bool = False, left: Spans = ()
    ) -> list[Instruction]:
        assert self.view is not None
        assert self._engines is not None
        itemsize = event.itemsize
        stamp = Stamp(self.epoch, event.step, event.signature, itemsize)
        whole = ((0, event.n_elements),)
        n_elements = size(left or whole)
        slice_elements = max(1, self._slice_nbytes(n_elements * itemsize) // itemsize)
        engine = self._engines.engine(stamp, n_elements, slice_elements)
        barrier, contributors = Barrier(self._phases), self.view.contributors
        at = (self.epoch, event.step)
        self._step = _Step(
            event, self.epoch, contributors, engine, barrier, at, follows, itemsize, left or whole
        )
        called = event.call if follows else None
        done: list[Instruction] = [
            Open(event.step, engine.scratch_elements, called, left),
            *self._announce(event),
        ]
        done += engine.start()
        done += self._enter_if_complete(now)
        return [*done, Resume()]

    def _announce(self, event: Submit) -> Iterable[Instruction]:
        """Tell the neighbours what the user called, whenever it is not what he called before.

        Learners are told in every step, as it is what lets them take part; servers that share memory tell
        nobody else, for all see it there.
        """
        assert self.view is not None
        direct = self.programs is not None and self.programs.direct is not None
        if direct and not self.view.learners:
            return []
        again = direct or self._announced == event.signature
        self._announced = event.signature
        text = event.call.encode()
        done: list[Instruction] = []
        for peer, level in sorted(self._watch.links):
            if not again or peer in self.view.learners:
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
        commit = Keep if step.follows else Commit
        done: list[Instruction] = [commit(self.committed, step.epoch, step.contributors)]
        if step.follows:
            assert self._learner is not None
            self._learner.keeps(step.submit)
            waiting, self._waiting = self._waiting, None
            done += self._replay(waiting, self._learner) if waiting else []
        if now - self._progress_at >= _PROGRESS_EVERY_S:
            self._progress_at = now
            done.append(Tell(msg.Progress(self.server, self.committed)))
        return [*done, *self._follow(now)]

    def _mismatch(self, submit: Submit, origin: int, theirs: str) -> BmlError:
        return StepMismatch(
            f"step {submit.step}: server {origin} called {theirs}, but server {self.server} called "
            f"{submit.call.text}; every server must make the same calls with the same shapes and dtypes"
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

    # --- joiners ---------------------------------------------------------------------------------

    def _give(self, event: Give) -> list[Instruction]:
        """Send a joiner its parts of the state, unless the view that asked for them is over."""
        if event.giving is not self._giving or self._member.frozen:
            return []
        self._giving = None
        done: list[Instruction] = []
        offset = 0
        for gift, head in zip(event.giving.gifts, event.heads, strict=True):
            text = head.encode()
            done.append(
                SendText(
                    gift.peer, gift.level, self._state(Kind.HEAD, event.step, gift.peer, 0, len(text)), text
                )
            )
            for start, stop in gift.part.pieces(head.nbytes):
                header = self._state(Kind.STATE, event.step, gift.peer, start, stop)
                done.append(Send(gift.peer, gift.level, header, Place(Buffer.STATE, offset), _STATE_PRIORITY))
                offset += stop - start
        return done

    def _state(self, kind: Kind, step: int, peer: int, start: int, stop: int) -> Header:
        return Header(kind, self.epoch, step, self.server, peer, 0, start, stop, stop - start)

    def _state_came(self, header: Header, text: str) -> list[Instruction]:
        if self._learner is None or header.epoch != self.epoch or self._member.frozen:
            return []
        return self._learner.head(header, text) if header.kind == Kind.HEAD else self._learner.piece(header)

    def _said_before(self) -> list[Instruction]:
        """What a new coordinator must be told."""
        gives = [Tell(msg.Gives(self.server))] if self._gives else []
        goes = [Tell(self._goes)] if self._goes else []
        return [*gives, *goes, *self._caught_up()]

    def _caught_up(self) -> list[Instruction]:
        """The user waits for the step that others are in: he has applied all before it."""
        if self._waiting is None or not self.follows or self._member.frozen:
            return []
        return [Tell(msg.CaughtUp(self.server, self.epoch))]

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
        outside = self._learner is not None and self.view is None and self._term >= 0  # it may take long
        if self._error is not None or outside or not (self._member.frozen or self._watch.suspects):
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
                # The status last: whoever has everybody's knows what everybody suspects.
                return [*self._watch.all_again(), *self._said_before(), Tell(self._status(term, 0))]
            case msg.Freeze():
                return self._freeze(message, now)
            case msg.Propose():
                return [Tell(self._member.propose(message))]
            case msg.Install(_, epoch):
                return self._install(now) if self._may_install(epoch) else []
            case msg.Evict() if self._learner is not None and self.view is None:
                return []  # it was never in: it waits on, to be let in by another view
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
        final = step.final if step else ()
        if self._resumes:
            submit, left = self._resumes
            final = missing(left, submit.n_elements)
        return self._member.status(term, epoch, self.committed, complete, ended.outcome, ended.error, final)

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
        self._proven_epoch = 0
        if self._learner is not None:
            self._learner.install(view)
            if not self.views:
                self.committed = view.commit
        fabric = self._base.without(*view.failures)
        programs = self._planner(fabric, self.server)
        self._engines = Engines(programs)
        direct = programs.direct
        self._phases = direct_phases(direct) if direct else barrier_phases(fabric, self.server)
        links = frozenset(
            (peer, level) for level in range(fabric.levels) for peer in fabric.neighbours(self.server, level)
        )
        self._watch.set_view(view, links, now)
        self._giving = giving(view, fabric, self.server, self._slice_nbytes(_STATE_NBYTES))
        self._announced = None
        self._needs_view_since = None
        if len(self.views) == _VIEWS_KEPT:
            del self.views[1]  # the first says how it began
        self.views.append(ViewRecord(view, self._frozen_at, now, recover_s=None))
        return [Installed(view), Links(links), *self._settle_step(view, now), Resume()]

    def _settle_step(self, view: msg.View, now: float) -> list[Instruction]:
        """Commit, go on with, or retry the step that the old view was in the middle of."""
        done: list[Instruction] = []
        step, (resumes, self._resumes) = self._step, (self._resumes, None)
        submit = step.submit if step else resumes[0] if resumes else None
        if submit is None:
            if view.commit > self.committed:
                raise InvariantError(
                    f"view {view.epoch} commits step {view.commit}, "
                    f"server {self.server} stands at {self.committed}"
                )
        elif view.commit >= submit.step:
            if step is None or not step.engine.complete:
                raise InvariantError(
                    f"view {view.epoch} commits step {view.commit}, incomplete on {self.server}"
                )
            done += self._commit(now)
        elif view.final:
            return self._go_on(submit, view, follows=step is not None and step.follows, now=now)
        else:
            self._step = None
            if step is None or not step.follows:
                self._waiting = submit
        if self.follows:
            return [*done, *self._caught_up()]
        waiting, self._waiting = self._waiting, None
        return done if waiting is None else [*done, Retry(waiting.step, view.epoch)]

    def _go_on(self, submit: Submit, view: msg.View, *, follows: bool, now: float) -> list[Instruction]:
        """The contributors stay: what is final stays, too, and the user need not bring anything again."""
        self._step = None
        event = replace(submit, epoch=view.epoch)
        left = missing(view.final, event.n_elements)
        if follows:
            return [*self._begin(event, now, follows=True, left=left), *self._caught_up()]
        self._resumes = (event, left)
        return [Prepare(view.epoch, size(left) * event.itemsize)]

    def _resume(self, epoch: int, now: float) -> list[Instruction]:
        if self._resumes is None or self._member.frozen or self._resumes[0].epoch != epoch:
            return []
        (event, left), self._resumes = self._resumes, None
        return self._begin(event, now, left=left)


__all__ = ["Leave", "Planner", "ServerCore", "ViewRecord"]
