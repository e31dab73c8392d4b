"""The steps of one server: submitted by its training function, run by an engine, committed by a barrier.

    idle               -- a submission of this epoch        -->  running
    running            -- all outputs final                 -->  complete   (enters the barrier)
    complete           -- every token is there              -->  committed  (its user gets the result)
    running, complete  -- a view is in force, commit >= step -->  committed  (it was complete, so were all)
    running, complete  -- commit < step, contributors stay  -->  running    (with what is not final yet)
    running, complete  -- commit < step                     -->  idle       (prepared again)

A contribution is only read, so a step can be tried as often as the fabric breaks. "The user" means the
training function and its thread.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from bml.errors import TooSlow
from bml.protocol.server import events as ev
from bml.protocol.server.calls import Calls
from bml.protocol.server.events import Instruction, Submit
from bml.protocol.server.history import ViewHistory
from bml.protocol.server.learner import Learner
from bml.protocol.server.member import Member
from bml.protocol.server.result_fetch import ResultFetch
from bml.protocol.server.running_step import RunningStep
from bml.protocol.server.watch import Links
from bml.protocol.step.barrier import Barrier, Phase, Token, barrier_phases
from bml.protocol.step.dataflow import Send, Stamp
from bml.protocol.step.direct import DirectEngine, Quit, Stage, direct_phases
from bml.protocol.step.exchange import Engines
from bml.protocol.step.spans import Spans, missing, size
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind
from bml.schedule import AnyPrograms
from bml.topology import Fabric
from bml.topology.errors import BmlError, InvariantError

_PROGRESS_EVERY_S = 0.1  # how often the coordinator is told of commits, which costs a message
_TOKEN_PRIORITY = -1  # before all slices, which count from 0


class StepMachine:
    """See the module's text. `current` is the step that is being synchronised, `committed` the last that was.

    `member` says what this server may do now; `learner`, if it joined, which step it follows.
    `slice_nbytes(nbytes)` is the size of the slices, in bytes, of a vector of `nbytes` bytes.
    """

    def __init__(
        self,
        member: Member,
        learner: Learner | None,
        calls: Calls,
        view_history: ViewHistory,
        slice_nbytes: Callable[[int], int],
        now: float,
    ):
        self.current: RunningStep | None = None
        self.committed = 0
        self._member = member
        self._learner = learner
        self._calls = calls
        self._view_history = view_history
        self._slice_nbytes = slice_nbytes
        self._engines: Engines | None = None
        self._phases: tuple[Phase, ...] = ()
        self._links: Links = frozenset()
        self._fetch = ResultFetch()
        self._waiting: Submit | None = None
        self._resumes: tuple[Submit, Spans] | None = None
        self._called = (0, 0)
        self._progress_at = now

    @property
    def next(self) -> int:
        """The step that is being synchronised, else the next one."""
        return self.committed + 1

    @property
    def programs(self) -> AnyPrograms | None:
        """Those of the view in force, None before the first."""
        return self._engines.programs if self._engines else None

    @property
    def follows(self) -> bool:
        """Whether this server takes part without contributing."""
        return self._learner is not None and self._learner.follows

    @property
    def in_doubt(self) -> bool:
        """Whether a result that a view commits is being fetched, or may be torn."""
        return self._fetch.awaited is not None

    @property
    def standing(self) -> tuple[int, Spans, int]:
        """The step that is complete here (-1: none), the current step's final elements, and its length."""
        step = self.current
        if self._resumes:
            submit, left = self._resumes
            return -1, missing(left, submit.n_elements), submit.n_elements
        if step is None:
            return -1, (), 0
        complete = step.submit.step if step.engine.complete else -1
        return complete, step.final, step.submit.n_elements

    def waits_for(self) -> str:
        """A text for users: what this server waits for, while it is neither stopped nor frozen."""
        step = self.current
        if step is None and self._fetch.awaited:
            return f"the result of step {self.committed} to be fetched, in an epoch that no server has left"
        if step is None:
            return f"the training function to bring step {self.next}"
        if not step.entered:
            return f"slices of step {self.next}: {step.engine.remaining} elements are not final"
        peers = step.barrier.missing
        return f"barrier tokens of step {self.next}" + (f" from servers {peers}" if peers else "")

    # --- a step begins ---------------------------------------------------------------------------

    def submit(self, event: Submit, now: float) -> list[Instruction]:
        """The user submits a contribution. Raises InvariantError if it is to another step than the next."""
        if self._member.stopped:
            return [ev.Stop(self._member.stopped)]
        if event.step <= self.committed and self._learner is not None:
            return self._fetch.hold_back(self._replay(event, self._learner))
        if event.step != self.committed + 1:
            raise InvariantError(
                f"server {self._member.server}: step {event.step} submitted, {self.next} is next"
            )
        if self._waiting or self._resumes or (self.current is not None and not self.current.follows):
            raise InvariantError(f"server {self._member.server}: step {event.step} submitted, and it runs")
        if self._member.frozen or self.follows:
            self._waiting = event
            return self.learning()
        if event.epoch != self._member.epoch:
            return [ev.Retry(event.step, self._member.epoch)]
        return self._begin(event, now)

    def follow(self, now: float) -> list[Instruction]:
        """A learner takes part in the next step once a neighbour has told the call."""
        if self._learner is None or self.current is not None or self._member.stopped is not None:
            return []
        if self._fetch.awaited:
            return []  # one thread fetches and follows
        event = self._learner.submit(self.next, self._member.epoch)
        if event is None:
            return []
        if not self.programs or not self.programs.direct:
            return self._begin(event, now, follows=True)
        called, self._called = self._called, (event.epoch, event.step)
        return [ev.ContributeNeutral(event)] if called != self._called else []

    def begin_to_follow(self, event: Submit, now: float) -> list[Instruction]:
        """The contribution that `ContributeNeutral` asked for is there: ignored if another step is next."""
        ours = (event.epoch, event.step) == (self._member.epoch, self.next)
        awaited = self.follows and self.current is None and not self._member.frozen
        return self._begin(event, now, follows=True) if ours and awaited else []

    def resume(self, epoch: int, now: float) -> list[Instruction]:
        """The schedule is prepared that a step needs to go on in this epoch."""
        if self._resumes is None or self._member.frozen or self._resumes[0].epoch != epoch:
            return []
        (event, left), self._resumes = self._resumes, None
        return self._begin(event, now, left=left)

    def waits_for_state(self) -> list[Instruction]:
        """The user of a joiner waits for the training state."""
        if self._learner is not None:
            self._learner.waits = True
        return self.learning()

    def arrived(self, step: int) -> list[Instruction]:
        """The user of a joiner is at the boundary before this step."""
        if self._member.stopped:
            return [ev.Stop(self._member.stopped)]
        if self._learner is None:
            return [ev.Begin(replays=False)]
        begin = self._learner.arrived(step, self.committed, self._member.frozen)
        return [begin, *self.learning()]

    def learning(self) -> list[Instruction]:
        """The message of a learner to the coordinator: it needs a later state, or has applied all results."""
        learner, member = self._learner, self._member
        if learner is None or member.frozen or member.stopped:
            return []
        return learner.progress(member.epoch, self.next, brought=self._waiting is not None)

    def _replay(self, event: Submit, learner: Learner) -> list[Instruction]:
        """Give the user the result of a step that was committed before the user came to it."""
        error = learner.refuses(event)
        return [ev.Replay(event.step)] if error is None else self.give_up(error)

    def give_up(self, error: BmlError) -> list[Instruction]:
        """A learner cannot go on: it leaves, and says so, lest the others wait until they notice."""
        return [ev.Tell(msg.Leaves(self._member.server, str(error))), *self.stop(error)]

    def _begin(
        self, event: Submit, now: float, *, follows: bool = False, left: Spans = ()
    ) -> list[Instruction]:
        view, engines = self._member.installed, self._engines
        assert view is not None
        assert engines is not None
        stamp = Stamp(view.epoch, event.step, event.signature, event.call.itemsize)
        n_elements = event.call.n_elements
        engine = engines.engine(stamp, size(left) if left else n_elements)
        barrier, at, contributors = Barrier(self._phases), (view.epoch, event.step), view.contributors
        self.current = RunningStep(
            event, contributors, engine, barrier, at, follows, left or ((0, n_elements),)
        )
        if not follows:
            self._calls.check_present(event, contributors)
            if self._fetch.awaited:
                self._fetch.drop()  # the user is past it
        called = event.call if follows else None
        done: list[Instruction] = [ev.Open(event.step, engine.scratch_elements, called, left)]
        shown = engines.programs.direct is not None
        if view.learners or not shown:
            done += self._calls.announce(event, self._links, view.learners, shown)
        done += engine.start()
        done += self.enter_if_complete(now)
        return done if shown else [*done, ev.Resume()]  # no frame of a step waits where memory is shared

    # --- a step runs and ends --------------------------------------------------------------------

    def enter_if_complete(self, now: float) -> list[Instruction]:
        """Enter the barrier, when all outputs are final."""
        step = self.current
        if step is None or step.entered or not step.engine.complete:
            return []
        step.entered = True
        return self._pass_barrier(step, step.barrier.enter(), now)

    def token(self, peer: int, round_: int, now: float) -> list[Instruction]:
        """A token of the current step came in."""
        step = self.current
        assert step is not None
        return self._pass_barrier(step, step.barrier.token(peer, round_), now)

    def handle_shared(self, event: ev.SharedStepEvent, now: float) -> list[Instruction]:
        """A step over shared memory: all have come to a stage, or this server has added, or fetched a result.

        Raises InvariantError if a server would pass the barrier with an incomplete step.
        """
        step = self.current
        if step is None or (event.epoch, event.step) != step.stamp:  # its epoch is over
            return self._result_fetched(event, now) if isinstance(event, ev.ResultFetched) else []
        engine = step.engine
        if self._member.frozen or not isinstance(engine, DirectEngine):
            return []
        match event:
            case ev.Gathered() if event.stage is Stage.COMPLETE:
                if not step.entered:
                    why = f"server {self._member.server} passes the barrier of {event} incomplete"
                    raise InvariantError(why)
                return self._commit(step, now)
            case ev.Gathered():
                return [*engine.gathered(event.stage), *self.enter_if_complete(now)]
            case ev.Summed():
                return [*engine.summed(event.whole), *self.enter_if_complete(now)]
            case ev.CallDiffers():
                self._calls.differs(step.submit, event.origin, event.text)
                return self.stop_on_conflict()
            case ev.ResultFetched():
                return []  # the user is past this step

    def returned(self, server: int, step: int) -> list[Instruction]:
        """The training function of another server returned after this step."""
        self._calls.returned(server, step)
        if self.current is not None and not self.current.follows:
            self._calls.check_present(self.current.submit, self.current.contributors)
        return self.stop_on_conflict()

    def stop_on_conflict(self) -> list[Instruction]:
        """End the job here when a neighbour called another thing."""
        conflict = self._calls.conflict
        if conflict is None or self._member.stopped is not None:
            return []
        self._member.stopped = conflict
        return [ev.Stop(conflict)]

    def stop(self, error: BmlError) -> list[Instruction]:
        """End the job here."""
        if self._member.stopped:
            return []
        self._member.stopped = error
        self._member.frozen = True
        self.current = None
        self._fetch.drop()
        return [*self._quit(self._member.epoch + 1), ev.Fence(), ev.Links(frozenset()), ev.Stop(error)]

    def _pass_barrier(self, step: RunningStep, tokens: list[Token], now: float) -> list[Instruction]:
        submit, server, (epoch, number) = step.submit, self._member.server, step.stamp
        done: list[Instruction] = []
        for peer, level, round_ in tokens:
            header = Header(Kind.TOKEN, epoch, number, server, peer, submit.signature, round_, 0, 0)
            done.append(Send(peer, level, header, None, _TOKEN_PRIORITY))
        return done + self._commit(step, now) if step.barrier.passed else done

    def _commit(self, step: RunningStep, now: float) -> list[Instruction]:
        return [*self._ended(step, now), *self.follow(now)]

    def _ended(self, step: RunningStep, now: float) -> list[Instruction]:
        """All members have committed the step."""
        self.current = None
        epoch, self.committed = step.stamp
        self._view_history.committed(now)
        done: list[Instruction] = []
        if step.follows:
            done += self._followed(step)
        else:
            done.append(ev.Commit(self.committed, epoch, step.contributors))
        if now - self._progress_at >= _PROGRESS_EVERY_S:
            self._progress_at = now
            done.append(ev.Tell(msg.Progress(self._member.server, self.committed)))
        return done

    def _followed(self, step: RunningStep) -> list[Instruction]:
        """A step that a learner took part in is committed."""
        learner, epoch = self._learner, step.stamp[0]
        assert learner is not None
        was_behind = learner.behind
        try:
            done = learner.keeps(step.submit, epoch, step.contributors)
        except TooSlow as error:
            return self.give_up(error)
        done += learner.state(self.committed)
        waiting, self._waiting = self._waiting, None
        done += self._replay(waiting, learner) if waiting else []
        return done if learner.behind == was_behind else [*done, *self.learning()]

    # --- the view changes ------------------------------------------------------------------------

    def install(self, programs: AnyPrograms, fabric: Fabric, links: Links) -> None:
        """A view is in force on this (damaged) fabric, in which this server has these links."""
        direct = programs.direct
        self._engines = Engines(programs, self._slice_nbytes)
        self._phases = direct_phases(direct) if direct else barrier_phases(fabric, self._member.server)
        self._links = links
        assert self._member.installed is not None
        self._calls.install(self._member.installed.contributors)

    def settle(self, view: msg.View, now: float) -> list[Instruction]:
        """Commit, go on with, or retry the step that was running.

        Raises InvariantError if the view commits a step that this server has not completed.
        """
        done: list[Instruction] = [*self._quit(view.epoch), *self._fetch.ask()]
        step, (resumes, self._resumes) = self.current, (self._resumes, None)
        submit = step.submit if step else resumes[0] if resumes else None
        if submit is None:
            if view.commit > self.committed:
                raise InvariantError(
                    f"view {view.epoch} commits step {view.commit}, "
                    f"server {self._member.server} stands at {self.committed}"
                )
        elif view.commit >= submit.step:
            if step is None or not step.engine.complete:
                raise InvariantError(
                    f"view {view.epoch} commits step {view.commit}, incomplete on {self._member.server}"
                )
            done += self._commit_by_view(step, now)
        elif view.final:
            return self._go_on(submit, view, follows=step is not None and step.follows, now=now)
        else:
            self.current = None
            if step is None or not step.follows:
                self._waiting = submit
        if self.follows:
            return [*done, *self.learning()]
        waiting, self._waiting = self._waiting, None
        return done if waiting is None else [*done, ev.Retry(waiting.step, view.epoch)]

    def _commit_by_view(self, step: RunningStep, now: float) -> list[Instruction]:
        if not isinstance(step.engine, DirectEngine):
            return self._commit(step, now)
        ended = self._ended(step, now)
        if self._member.stopped:  # a joiner gives up
            return ended
        return self._fetch.begin(ev.FetchResult(*step.stamp, step.follows), ended)

    def _result_fetched(self, event: ev.ResultFetched, now: float) -> list[Instruction]:
        """The result of a step that a view commits is there."""
        return [*self._fetch.fetched(event, self._member.epoch), *self.follow(now)]

    def _quit(self, epoch: int) -> tuple[Quit, ...]:
        """Where memory is shared, all are to see that this server has left the epochs before."""
        return (Quit(epoch),) if self.programs and self.programs.direct else ()

    def _go_on(self, submit: Submit, view: msg.View, *, follows: bool, now: float) -> list[Instruction]:
        """The contributors stay, so final elements stay final, and the user need not submit again."""
        self.current = None
        event = replace(submit, epoch=view.epoch)
        left = missing(view.final, event.n_elements)
        if follows:
            return [*self._begin(event, now, follows=True, left=left), *self.learning()]
        self._resumes = (event, left)
        return [ev.Prepare(view.epoch, size(left) * event.itemsize)]
