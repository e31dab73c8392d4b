"""The collectives of one session: calls that every server makes alike, and the steps that carry them out.

A collective is a pair of functions. `Work` synchronises a step with the other servers, in the thread that
waits for the step. `Finish` makes the user's result of what the work returned, in the training thread.
The modules of `bml.train.operations` make the pairs of plain collectives; a `Batch` makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from bml.errors import ContributorLost
from bml.protocol.step.workspace import Array, vector_of
from bml.topology.errors import BmlError, UsageError
from bml.train.agreement import Prepare
from bml.train.balancing.stopwatch import Stopwatch
from bml.train.balancing.throughput import Throughput
from bml.train.calls import Calls
from bml.train.communicator import Committed, Communicator
from bml.train.pending import CollectiveQueue, Finish, Pending, Then, Work
from bml.train.position import Position
from bml.train.priority.pieces import Pieces
from bml.train.vectors import describe

CHANGED = (
    "{what} was changed before its step was committed: what is given to allreduce_async is not yours until "
    "wait has returned"
)
Called = tuple[str, int]
"""A call in words, and the hash that all servers must agree on."""


class Aside(Protocol):
    """A contribution in the user's memory."""

    def set_aside(self) -> None:
        """Copy it, once: the user's memory may change from here on."""
        ...


class Collectives:
    """Checks and describes the calls of one session, and carries them out in order."""

    def __init__(self, communicator: Communicator):
        self.communicator = communicator
        self.calls = Calls(communicator.slowdown)
        self.stopwatch = Stopwatch(lambda: communicator.clock())
        self.throughput = Throughput(lambda: communicator.clock(), lambda: self.stopwatch.all_waited_s)
        self.steps = CollectiveQueue(self.calls.later, self.stopwatch, self.throughput.pace)
        self.position = Position(get_ident)
        self.contributors = communicator.servers
        """The servers whose contributions are in the last step that was waited for. At first these are all
        servers of the job, not the members of the first view: if a server is lost at start-up, only some may
        have seen that view, and all must split the first batch alike."""
        self.has_begun = not communicator.joins
        """False on a server that joins, until it has taken the others' state."""
        self.n_steps = 0
        """How many steps were committed."""
        self.first_step = 0
        """Is added to the numbers of steps: those of a job that goes on from a checkpoint go on, too."""
        self.n_calls = 0
        """Calls since the last boundary. They tell apart two calls that look alike."""
        self.wants_state = False
        """Whether a server waited for the training state in the newest step with a priority that was waited
        for. As it was reduced with the step, all servers know the same."""
        self._newest = self._newest_with_priority = 0
        self._noted: dict[int, tuple[int, tuple[int, ...], bool]] = {}
        """Of the steps with a priority that were begun in an iteration and waited for: the number of the
        newest one, its contributors, and whether a server waited for the state."""
        self._piece_memory: Array | None = None
        self.under_way: list[Aside] = []
        """The parts of batches that are not committed, or not waited for."""
        self.debug = os.environ.get("BML_DEBUG", "0") not in ("", "0")
        """Whether check sums show that an array was changed before its step was committed."""

    @cached_property
    def n_servers(self) -> int:
        """See Session.n_servers."""
        return self.communicator.n_servers

    def admit(self) -> None:
        """Count a call that the training function makes. Raises an error if it may not be made now."""
        self.n_calls += 1  # a refused call counts, as other servers may have made it
        self.calls.check()
        self.calls.slowdown.pause()  # before the computation of a batch is timed
        if self.position.aims and self.communicator.joins:
            raise UsageError(
                f"server {self.communicator.server} joins a running job and is catching up, the others are "
                f"in {self.position.aim}: it cannot be given the results of calls outside of that loop; move "
                "this call into it"
            )
        if not self.has_begun:
            raise UsageError(
                f"server {self.communicator.server} joins a running job: it can make no call in which others "
                "take part before its first session.batches or session.steps begins"
            )

    def describe(self, call: str, dtype: np.dtype[Any], shapes: tuple[tuple[int, ...], ...]) -> Called:
        """A call and its place in the program, in words and as the hash that all servers must agree on."""
        what, what_signature = describe(call, dtype, shapes)
        where, where_signature = self.position.described
        # What differs in one of the three has another signature.
        return what + where, ((what_signature ^ where_signature) + self.n_calls) & 0xFFFFFFFF

    def run(self, work: Work, finish: Finish) -> Any:
        """Carry out a collective, and return its result. A ContributorLost, as its result, is raised."""
        with self.calls:
            result = self.steps.run(work, finish)
            is_lost = type(result) is ContributorLost
        if is_lost:  # no exception has left the call: the session can go on
            raise result
        return result

    def begin(
        self,
        work: Work | Pieces,
        finish: Finish,
        whole: Sequence[Pending] | None = None,
        priority: int | None = None,
    ) -> Pending:
        """Put a collective behind those that were begun before; see CollectiveQueue.begin."""
        if isinstance(work, Pieces):
            work.begun_in = self.steps.iteration
        with self.calls:
            return self.steps.begin(work, finish, whole, priority)

    def check_has_begun(self) -> None:
        """Raise UsageError if the training function ended before this joiner took the others' state."""
        if not self.has_begun:
            raise UsageError(
                f"server {self.communicator.server} joins a running job, and its training function ended "
                "before its first session.batches or session.steps"
            )

    def begin_iteration(self) -> None:
        """A boundary was passed: an iteration of a loop begins, or the loop is over."""
        self.n_calls = 0
        self.throughput.pace.passed(self.position.done)

    def end_iteration(self) -> None:
        """Wait for what was begun before the iteration that ends, and go by what was noted of it."""
        self.steps.end_iteration()
        self._go_by_notes(self.steps.iteration - 1)

    def drain(self) -> None:
        """Wait for every step, and go by what was noted of all."""
        self.steps.wait_for_all()
        self._go_by_notes(self.steps.iteration)

    def end_loop(self) -> None:
        """Wait for the steps of a loop that was left; an error of a step is raised by the next call."""
        try:
            if self.steps.under_way:
                with self.calls:
                    self.steps.end_loop()
            self._go_by_notes(self.steps.iteration + 1)
        except BaseException as error:
            # What a signal's handler raises, as for Ctrl-C, comes from here: nobody else would hear it.
            if not (self.calls.is_broken and (isinstance(error, BmlError) or self.steps.have_failed(error))):
                raise

    def settle(self) -> None:
        """Wait for every step, for somebody who reads what they change; not once nothing can come any more.

        It is no place at which all servers are, so it goes by nothing that they say.
        """
        if self.steps.under_way and not (self.steps.is_closed or self.calls.is_broken):
            with self.calls:
                self.steps.wait_for_all()

    def followed_by(self, finish: Finish, then: Then | None) -> Finish:
        """A `finish` after which the user's function `then` takes the result; it may make no call."""
        if then is None:
            return finish

        def both(outcome: Any) -> Any:
            result = finish(outcome)
            self.calls.compute(lambda: then(result))
            return result

        return both

    def note(self, step: int, contributors: tuple[int, ...], pieces: Pieces | None = None) -> None:
        """A step was waited for; with a priority it has `pieces`.

        A server may wait for a step with a priority sooner than others, for example if it writes a checkpoint
        alone. So what such a step says counts from the boundary on at which all have waited for it. It never
        depends on what happens to be committed, and is the same on all servers at the same place.
        """
        if pieces is None:
            self._go_by(step, contributors)
        else:
            found = (step, contributors, pieces.wants_state)
            self._noted[pieces.begun_in] = max(found, self._noted.get(pieces.begun_in, found))

    def _go_by_notes(self, iteration: int) -> None:
        """Go by what steps with a priority have said that were begun before this iteration."""
        for begun_in in [each for each in self._noted if each < iteration]:
            step, contributors, wants_state = self._noted.pop(begun_in)
            self._go_by(step, contributors)
            if step > self._newest_with_priority:
                self._newest_with_priority, self.wants_state = step, wants_state

    @property
    def newest(self) -> int:
        """The newest step that all servers go by: at a boundary it is the same on all of them."""
        return self._newest

    def go_on_from(self, steps: int, first_step: int) -> None:
        """Take over how many steps were committed, and what is added to their numbers."""
        self._newest, self.first_step = steps, first_step

    def _go_by(self, step: int, contributors: tuple[int, ...]) -> None:
        if step > self._newest:
            self._newest, self.contributors = step, contributors

    @property
    def piece_nbytes(self) -> int:
        """See bml.train.priority.pieces.PieceContext."""
        return self.communicator.piece_nbytes

    def piece_memory(self, n_elements: int, dtype: np.dtype[Any]) -> Array:
        """See bml.train.priority.pieces.PieceContext; called in the thread of the steps alone."""
        memory, self._piece_memory = self._piece_memory, None
        if memory is None or memory.dtype != dtype or memory.size < n_elements:
            memory = self.communicator.empty(n_elements, dtype)
        return memory

    def free_piece(self, memory: Array) -> None:
        """See bml.train.priority.pieces.PieceContext."""
        self._piece_memory = memory

    def step(self, call: Called, op: str, prepare: Prepare, shared: bool = False) -> Committed:
        """Synchronise one step. The contribution is prepared again for every view until it is committed."""
        done = self._carry_out(call, op, prepare, shared)
        took_part = self.communicator.server in done.contributors
        self.throughput.step(len(done.contributors), done.epoch, took_part)
        return done

    def _carry_out(self, call: Called, op: str, prepare: Prepare, shared: bool = False) -> Committed:
        text, signature = call
        while True:
            view = self.communicator.view
            contribution = prepare(view)
            pace = self.throughput.pace
            pace.begin()
            outcome = self.communicator.sync(view.epoch, contribution, op, text, signature, shared)
            if isinstance(outcome, Committed):
                nbytes, waits = vector_of(contribution).nbytes, not self.steps.in_worker_thread
                pace.end(outcome.epoch, len(outcome.contributors), nbytes, waits)
                self.n_steps += 1
                if self.first_step:
                    outcome = structs.replace(outcome, step=outcome.step + self.first_step)
                return outcome

    def own_step(self, call: str, op: str, dtype: npt.DTypeLike, size: int, prepare: Prepare) -> Committed:
        """Reduce a vector that no call of the training function asked for, at a boundary.

        Like a blocking call it comes after all that was begun.
        """
        self.steps.wait_for_all()
        done = self._carry_out(self.describe(call, np.dtype(dtype), ((size,),)), op, prepare)
        self.throughput.n_own_steps += 1
        return done
