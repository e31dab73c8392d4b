"""One server's core: its steps, its membership and its detector, as one state machine without I/O.

    idle       -- the user submits, epoch is current  -->  running
    running    -- all outputs final, all tokens there -->  committed  (see steps.py)
    running    -- Freeze                              -->  frozen     (reports where it stands; see member.py)
    frozen     -- Install                             -->  committed, running on or idle, as the view says

Its shell calls `handle(event, now)` for every event, and carries out the instructions that it returns. Some
events are so frequent that each has a method of its own, which spares an object per call: `admit` and
`received` for every frame, `heard` for every sign of life, `flows` for what the kernel knows of connections,
and `handle_shared` for the stages of steps over shared memory (`handle` takes those events, too).

This module dispatches; steps.py, member.py, watch.py, learner.py, donor.py and control_frames.py decide.
"""

from __future__ import annotations

from collections.abc import Callable

from bml.errors import Evicted, job_error
from bml.faults.slowness import slowed
from bml.protocol.server import events as ev
from bml.protocol.server.calls import Calls
from bml.protocol.server.control_frames import ControlFrames
from bml.protocol.server.donor import Donor
from bml.protocol.server.events import Event, Instruction, Tell, Verdict
from bml.protocol.server.history import ViewHistory, ViewRecord
from bml.protocol.server.learner import KEPT_NBYTES, Learner
from bml.protocol.server.lease import CoordinatorLease
from bml.protocol.server.member import Member
from bml.protocol.server.steps import StepMachine
from bml.protocol.server.transfer import OutgoingState
from bml.protocol.server.watch import Links, Watch, links_of
from bml.protocol.step.dataflow import Dataflow, Place
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.schedule import AnyPrograms
from bml.topology import Fabric
from bml.topology.errors import FabricError

Planner = Callable[[Fabric, int], AnyPrograms]


class ServerCore:
    """The core of `server` on the whole `fabric`; see the module's text.

    `planner(fabric, server)` returns this server's programs on a damaged fabric. `slice_nbytes(nbytes)` is
    the length of the slices, in bytes, of a vector of so many bytes. `now` is in seconds. `incarnation` is
    None for a server that is there from the beginning; another one joins as a learner, and keeps results of
    up to `kept_nbytes`.
    """

    def __init__(
        self,
        server: int,
        fabric: Fabric,
        planner: Planner,
        timeouts: Timeouts,
        slice_nbytes: Callable[[int], int],
        now: float,
        incarnation: msg.Incarnation | None = None,
        kept_nbytes: int = KEPT_NBYTES,
    ):
        self.server = server
        self.timeouts = timeouts
        self._base = fabric
        self._planner = planner
        self._member = Member(server, incarnation, ready=incarnation is None)
        self._learner = Learner(server, kept_nbytes) if incarnation else None
        self._donor = Donor(server, slice_nbytes)
        self._leaving: msg.Leaves | None = None
        self._watch = Watch(server, fabric, timeouts.detect_s, now)
        self._calls, self._view_history = Calls(server), ViewHistory(now)
        self._steps = StepMachine(
            self._member, self._learner, self._calls, self._view_history, slice_nbytes, now
        )
        self.handle_shared, self.flows = self._steps.handle_shared, self._watch.flows
        self.heartbeat_delays_s = self._watch.heartbeat_delays_s
        self._control_frames = ControlFrames(self._member, self._steps, self._learner, self._calls)
        self._outcome, self._term = ev.Ended(""), -1
        self._lease = CoordinatorLease(timeouts)

    # --- properties for the shell ----------------------------------------------------------------

    @property
    def view(self) -> msg.View | None:
        """The installed view."""
        return self._member.installed

    @property
    def views(self) -> list[ViewRecord]:
        """The views that this server was in."""
        return self._view_history.records

    @property
    def epoch(self) -> int:
        """Epoch of the installed view, 0 before the first."""
        return self._member.epoch

    @property
    def programs(self) -> AnyPrograms | None:
        """Those of the installed view, None before the first."""
        return self._steps.programs

    @property
    def committed(self) -> int:
        """The last step that is committed here."""
        return self._steps.committed

    @property
    def step(self) -> int:
        """The step that is being synchronised, else the next one."""
        return self._steps.next

    @property
    def follows(self) -> bool:
        """Whether this server is a learner: it takes part without contributing."""
        return self._steps.follows

    @property
    def in_doubt(self) -> bool:
        """Whether a result that a view commits is being fetched, or may be torn (see result_fetch.py)."""
        return self._steps.in_doubt

    @property
    def outgoing_state(self) -> OutgoingState | None:
        """The state that this server is to send to joiners at the next boundary after a step of this view."""
        return None if self._member.frozen else self._donor.due(self.committed)

    @property
    def progress(self) -> float | None:
        """How far the current step is on this server, 0 to 1; None when there is none."""
        step = self._steps.current
        return step.engine.progress if step else None

    @property
    def phase(self) -> str:
        """Where this server is, as fault plans call it (bml.faults.notation); "" when nothing goes on.

        A result that arrives does not show here: `reduce` lasts until all outputs are final.
        """
        if self._member.stopped:
            return ""
        if self._member.frozen:
            return "recovery" if self.view else "start" if self._term >= 0 else ""
        if self._learner is not None and self.follows and not self._learner.has_state:
            return "transfer"
        if self._outcome.outcome:
            return "shutdown"
        step = self._steps.current
        if step is None or not step.engine.handled:
            return "compute"
        return "complete" if step.entered else "reduce"

    @property
    def coordinator_term(self) -> int:
        """The highest term of a coordinator that was heard; -1 before any."""
        return self._term

    @property
    def suspicions(self) -> tuple[msg.Suspect, ...]:
        """The links that this server suspects."""
        return self._watch.suspicions

    @property
    def suspected_peers(self) -> frozenset[int]:
        """The servers at the other ends of these links."""
        return frozenset(each.peer for each in self.suspicions if each.peer != self.server)

    @property
    def unanswered(self) -> int:
        """How many questions to the coordinator were asked since one was heard last."""
        return self._lease.unanswered

    def waits_for(self) -> str:
        """A text for users: what this server waits for."""
        if self._member.stopped:
            return f"nothing: stopped ({self._member.stopped})"
        if self._member.frozen:
            return f"the coordinator's view after epoch {self.epoch}"
        if self._learner is not None and self.follows and not self._learner.has_state:
            return f"the training state, following step {self.step}"
        return self._steps.waits_for()

    @property
    def urgent(self) -> bool:
        """Whether a Tick is due at once, whatever the time."""
        if not self._member.proven_epoch and self._calls.conflict is None:
            return False  # nearly always
        proven = self._may_install(self._member.proven_epoch)
        return proven or (self._calls.conflict is not None and self._member.stopped is None)

    def next_deadline(self, now: float) -> float:
        """Until when, at the latest, a Tick is due."""
        return self._watch.next_deadline(now)

    # --- events ----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """React to an event at time `now` (seconds, any origin, never going back)."""
        match event:
            case ev.Tick():
                return self._tick(now)
            case ev.Submit():
                return self._steps.submit(event, now)
            case ev.Follow(submit):
                return self._steps.begin_to_follow(submit, now)
            case ev.Ready():
                self._member.ready = True
                needs = self._steps.waits_for_state()
                return [Tell(self._status(self._term, 0)), *needs] if self._term >= 0 else []
            case ev.CanSendState():
                return self._donor.can_send_state()
            case ev.SendState():
                return [] if self._member.frozen else self._donor.send(event)
            case ev.Prepared(epoch):
                return self._steps.resume(epoch, now)
            case ev.Arrived(step):
                return self._steps.arrived(step)
            case ev.Leaving(why):
                self._leaving = msg.Leaves(self.server, why)
                self._lease.leaves(now)
                return [Tell(self._leaving)]
            case ev.Abandoned():
                return self._lease.abandon()
            case ev.Alone():
                if self.view is not None or self._member.stopped:
                    return []
                what = (
                    f"server {self.server} was started again, and all others had ended before it was let in"
                )
                return self._steps.stop(Evicted(what))
            case ev.Control(message):
                return self._control(message, now)
            case ev.PeerLost(peer, level, kind, why):
                if self._member.stopped or (self._member.frozen and kind == "timeout"):
                    return []
                return [*self._watch.lost(peer, level, kind, why, now)]
            case ev.Proved() | ev.OwnNicLost() | ev.LossyNics() | ev.StoodIn():
                return self._watch.handle(event, now)
            case ev.Ended(outcome):
                self._outcome = event  # a joiner that was never a member is not needed any more
                out = outcome == "failed" and self._learner is not None and self.view is None
                self._lease.asks(False, True, now)
                return [self._ended_message(), *[ev.Exit()] * out]
            case ev.Gathered() | ev.Summed() | ev.CallDiffers() | ev.ResultFetched():
                return self._steps.handle_shared(event, now)

    def heard(self, peer: int, level: int, now: float) -> None:
        """A sign of life of (peer, level): a heartbeat or any byte."""
        self._watch.heard(peer, level, now)

    # --- frames ----------------------------------------------------------------------------------

    def admit(self, peer: int, header: Header) -> Place | Verdict:
        """Return where the payload of a frame belongs, or what else to do with the frame.

        Raises FrameError for a frame that no correct server sends: its connection is to be closed.
        """
        step = self._steps.current
        if step is None or header[1:3] != step.stamp or header.kind > Kind.BROADCAST or self._member.frozen:
            return self._control_frames.admit(header)
        if header.signature != step.submit.signature:
            return self._control_frames.admit(header)
        kind, _, _, origin, dest, _, start, stop, nbytes = header
        engine = step.engine
        if nbytes != (stop - start) * engine.stamp.itemsize:
            raise FrameError(f"{nbytes} bytes cannot be elements {start}:{stop}")
        return engine.place(kind, origin, dest, start, stop)

    def summand_place(self, header: Header) -> Place | None:
        """Where the payload of a frame just admitted belongs, if it need not be there; see Dataflow."""
        step = self._steps.current
        return step.engine.summand_place(header) if step and isinstance(step.engine, Dataflow) else None

    def received(self, peer: int, header: Header, text: str, now: float) -> list[Instruction]:
        """An admitted frame is complete (its payload is where `admit` said, or in `text`).

        Raises FrameError for a frame that no correct server sends: its connection is to be closed.
        """
        kind, step = header.kind, self._steps.current
        if kind >= Kind.DESCRIBE:
            return self._control_frames.received(header, text, len(self._watch.links), now)
        if step is None or header[1:3] != step.stamp or self._member.frozen:
            return []  # its epoch ended between admission and the last byte
        if kind == Kind.TOKEN:
            return self._steps.token(peer, header.start, now)
        engine = step.engine
        done: list[Instruction] = []
        done += engine.received(kind, header.origin, header.dest, header.start, header.stop)
        if engine.remaining == 0 and not step.entered:
            done += self._steps.enter_if_complete(now)
        return done

    def _tick(self, now: float) -> list[Instruction]:
        questions = self._questions(now)
        if why := self._goes_alone(now):
            return self._steps.stop(FabricError(f"server {self.server} {why}"))
        done = self._steps.stop_on_conflict()
        if self._may_install(self._member.proven_epoch):
            done += self._install(now)
        self._watch.be_patient(self.timeouts.patience_s(self.committed))
        return done + questions + self._watch.tick(now)

    def _questions(self, now: float) -> list[Instruction]:
        """Ask the coordinator whether it is there."""
        if self._member.stopped is not None or not self._lease.asks(self._needs_view, self._waits, now):
            return []
        return [self._ended_message() if self._outcome.outcome else Tell(msg.Ask(self.server))]

    def _ended_message(self) -> Instruction:
        return Tell(msg.Ended(self.server, self._outcome.outcome, self._outcome.error, self.committed))

    @property
    def _is_outside(self) -> bool:
        """Whether a coordinator has called this joiner, and is to let it in, which may take long."""
        return self._learner is not None and self.view is None and self._term >= 0

    @property
    def _needs_view(self) -> bool:
        """Whether nothing goes on here before there is another view."""
        needs = self._member.frozen or bool(self._watch.suspects) or self.in_doubt
        return needs and not self._is_outside

    @property
    def _waits(self) -> bool:
        """Whether this server waits for a word of the coordinator that may come late."""
        return self._is_outside or bool(self._outcome.outcome)

    def _goes_alone(self, now: float) -> str:
        """Say why this server ends without a coordinator's word, that it needs; empty: it does not."""
        if self._member.stopped is not None:
            return ""
        if self._leaving and (alone := self._lease.leaves_alone(now)):
            return f"leaves: {self._leaving.why}; {alone}"
        if self._lease.in_vain:
            silent = f"no coordinator has answered for {self.timeouts.orphan_s:g} s"
            ended = bool(self._outcome.outcome)
            return f"is done, and {silent}, so none will end the job" if ended else f"is not let in: {silent}"
        waited = self._lease.lacks_view(self._needs_view, bool(self._outcome.outcome), now)
        return waited and (
            f"has waited {waited} for a view after epoch {self.epoch}: is there a coordinator? It waits for "
            f"{self.waits_for()}"
        )

    # --- membership ------------------------------------------------------------------------------

    def _control(self, message: msg.ToServer, now: float) -> list[Instruction]:
        term = getattr(message, "term", self._term)
        if term < self._term:
            return [Tell(msg.Deposed(self.server, self._term))]  # its successor has asked already
        self._term = term
        self._lease.heard(now)
        match message:
            case msg.Who():
                # The status last: a coordinator that has all of them knows what all servers suspect.
                suspected = self._watch.for_new_coordinator(now)
                return [*suspected, *self._earlier_messages(), Tell(self._status(term, 0))]
            case msg.Freeze():
                return self._freeze(message, now)
            case msg.Propose():
                return [Tell(self._member.propose(message))]
            case msg.Install(_, epoch):
                return self._install(now) if self._may_install(epoch) else []
            case msg.Evict(_, epoch) if self._learner is not None and self.view is None:
                return self._left_out(epoch)
            case msg.Evict(_, epoch, reason):
                return self._steps.stop(Evicted(f"server {self.server} is out of view {epoch}: {reason}"))
            case msg.Abort(_, kind, text, server):
                return self._steps.stop(job_error(kind, text, server))
            case msg.Shutdown() if self._outcome.outcome or self._member.stopped:
                return [ev.Exit()]
            case msg.Shutdown():
                return self._steps.stop(Evicted(f"server {self.server} is out: the others ended without it"))
            case msg.Returned(_, server, step):
                return self._steps.returned(server, step)
            case msg.Noted() | msg.Inject():
                return []  # a sign of life; or for the shell alone

    def _earlier_messages(self) -> list[Instruction]:
        """Earlier messages that a new coordinator must get, too."""
        return [
            *self._donor.announced(),
            *([Tell(self._leaving)] if self._leaving else []),
            *self._steps.learning(),
        ]

    def _left_out(self, epoch: int) -> list[Instruction]:
        """Wait to be let in by another view; a coordinator forgets a late joiner, so ask again."""
        asks = self._member.left_out(epoch) and not self._outcome.outcome and not self._leaving
        return [Tell(self._status(self._term, 0))] if asks else []

    def _may_install(self, epoch: int) -> bool:
        return self._member.stopped is None and self._member.may_install(epoch)

    def _status(self, term: int, epoch: int) -> msg.Status:
        behind = self._learner is not None and self._learner.late
        return self._member.status(term, epoch, self.committed, self._steps.standing, self._outcome, behind)

    def _freeze(self, message: msg.Freeze, now: float) -> list[Instruction]:
        if self._member.stopped:
            return []
        was_frozen = self._member.frozen
        if refused := self._member.freeze(message):
            return [Tell(refused)]
        if not was_frozen:
            self._view_history.frozen(now)
        return [ev.Fence(), Tell(self._status(message.term, message.epoch))]

    def _install(self, now: float) -> list[Instruction]:
        view = self._member.install()
        self._member.proven_epoch = 0
        if self._learner is not None:
            self._learner.install(view)
            if not self._view_history.records:
                self._steps.committed = view.commit
        fabric, links = self.plan(view)
        self._watch.set_view(view, links, now)
        self._donor.install(view, fabric)
        self._lease.has_view()
        self._view_history.installed(view, now)
        return [ev.Installed(view), ev.Links(links), *self._steps.settle(view, now), ev.Resume()]

    def plan(self, view: msg.View) -> tuple[Fabric, Links]:
        """Make the programs of this server in a view; returns the damaged fabric, and its links there."""
        fabric = self._base.without(*view.failures)
        programs = self._planner(slowed(fabric, view.halvings), self.server)
        links = links_of(fabric, self.server)
        self._steps.install(programs, fabric, links)
        return fabric, links
