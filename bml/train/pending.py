"""Steps that go on while the training thread computes: a thread of their own takes them in order.

All servers begin the same steps in the same order, so the queue is the same everywhere. Steps with a priority
are sent in pieces, in an order on which all servers agree (bml.train.priority). Only the training thread may
compute again what a lost server had not contributed. It does so while it waits for any step, as the steps
behind cannot go on before.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from bml.errors import ContributorLost
from bml.predict.pace import Pace
from bml.topology.errors import UsageError
from bml.train.balancing.stopwatch import Stopwatch
from bml.train.priority.order import Order
from bml.train.priority.pieces import Pieces

_END_S = 1.0
"""How long the thread may take to see that the job is over."""

Work = Callable[[], Any]
"""Synchronises a step, in the thread of the steps, and returns its outcome."""
Finish = Callable[[Any], Any]
"""Makes the user's result of that outcome, in the training thread."""
Then = Callable[[Any], object]
"""Takes the result of a step, such as an update of the parameters, in the training thread."""


class Pending:
    """A step that was begun by `Session.allreduce_async`, `Batch.allreduce_async` or their kin.

    Its arrays must not change before `wait` has returned.
    """

    def __init__(
        self,
        steps: CollectiveQueue,
        work: Work | Pieces,
        finish: Finish,
        whole: Sequence[Pending] | None = None,
        priority: int | None = None,
    ):
        self._steps = steps
        self._finish: Finish | None = finish
        self._whole = whole
        self.priority = priority
        self.iteration = steps.iteration
        """In which iteration of the training function it was begun."""
        self.work: Work | Pieces | None = work
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.over = False
        self._result: Any = None
        self._is_given = False

    @property
    def done(self) -> bool:
        """Whether the step is over, committed or failed: `wait` would return, or raise, at once."""
        return self._last.over

    def wait(self) -> Any:
        """Wait until every server has committed the step; returns the result of the blocking call.

        Steps that were begun before are waited for as well, and of a part of a batch those of its other
        parts; with a priority it waits for this step alone. `recompute` is called in here, for any step that
        needs it. May be called again, also by other threads. Raises the error that ends the job, UsageError
        for what `recompute` must not return, ContributorLost as the blocking call does, and SessionBroken
        after an exception left a call.
        """
        with self._steps.waiting():
            self._steps.wait(self._last)
            result = self.finish()
            is_lost = type(result) is ContributorLost
        # No call from here on: neither a handler of a signal nor another thread can come in between.
        if not self._is_given:
            self._is_given = True
            if self.priority is None:
                self._steps.n_owed -= 1
        if is_lost:  # no exception has left the call: the session can go on
            raise result
        return result

    @property
    def _last(self) -> Pending:
        return self._whole[-1] if self._whole else self

    def finish(self) -> Any:
        """The result of a step that is over."""
        if self.error is not None:
            raise self.error
        if self._finish is not None:
            self._result = self._finish(self.outcome)
            self._finish = self.outcome = None  # the contribution need not be kept any longer
        return self._result


class _MainThreadCall:
    """A function that the training thread calls for the thread of the steps; `bell` brings its result.

    An exception that is not an `Exception`, such as KeyboardInterrupt, leaves `run` and breaks the session.
    """

    def __init__(self, function: Callable[[], Any]):
        self.function = function
        self.over = False
        self.bell: queue.SimpleQueue[tuple[Any, Exception | None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        value, failed = None, None
        try:
            value = self.function()
        except Exception as error:
            failed = error
        self.bell.put((value, failed))
        self.over = True


class CollectiveQueue:
    """The queue of one session. The thread of the steps calls `ask`; the training thread calls the rest.

    `waiting` makes the context in which a thread waits; the `stopwatch` stands still meanwhile.
    """

    def __init__(
        self,
        waiting: Callable[[], AbstractContextManager[object]],
        stopwatch: Stopwatch | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.waiting = waiting
        self._stopwatch = stopwatch or Stopwatch(lambda: 0.0)
        self._pace = pace or Pace(lambda: 0.0)
        # Queues, not a condition: a signal's handler that raised in a condition would leave its lock wrong.
        self._begun: deque[Pending] = deque()
        """Steps that were begun and not waited for yet."""
        self._iteration_of_latest = -1
        """In which iteration the latest step with a priority was begun."""
        self.iteration = 0
        """How often the training function has passed a boundary."""
        self._order: Order[Pending] = Order()
        """What the thread of the steps has to do, and of which step it does the next piece."""
        self._todo: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the training thread, if it `_listens`, when a step is over or there is a call to make."""
        self._listens = False
        self._call: _MainThreadCall | None = None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.is_closed = False
        """Whether its thread was told to end: nothing is to be waited for."""
        self.n_owed = 0
        """How many handles without a priority there are whose `wait` has not returned. Their steps may be
        over: another wait finishes a step as well, but only its own gives the result to the training
        function."""

    def begin(
        self,
        work: Work | Pieces,
        finish: Finish,
        whole: Sequence[Pending] | None = None,
        priority: int | None = None,
    ) -> Pending:
        """Put a step behind those that were begun before; it is waited for with all of `whole`.

        With a priority it is `Pieces`, and may overtake others that have one.
        """
        if self.is_closed:
            raise UsageError("the training function has ended: no step can begin any more")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bml-steps", daemon=True)
            self._thread.start()
        made = Pending(self, work, finish, whole, priority)
        self._begun.append(made)
        self._todo.put(made)
        if priority is None:
            self.n_owed += 1
        else:
            self._iteration_of_latest = self.iteration
        return made

    def check_none_is_owed(self) -> None:
        """Raise UsageError if the training function has not waited for a step without a priority."""
        if self.n_owed:
            raise UsageError(
                f"{self.n_owed} steps were begun and not waited for: call wait() of everything that "
                "allreduce_async returned before the training loop goes on, or give it a priority"
            )

    def run(self, work: Work, finish: Finish) -> Any:
        """Do a step in the training thread, as soon as those that were begun are over."""
        if self._begun:
            self.wait_for_all()
        with self._stopwatch:
            return finish(work())

    @property
    def in_worker_thread(self) -> bool:
        """Whether the caller is the thread of the steps."""
        return threading.current_thread() is self._thread

    @property
    def under_way(self) -> bool:
        """Whether there are steps that were begun and not waited for here."""
        return bool(self._begun)

    @property
    def may_be_under_way(self) -> bool:
        """Whether steps with a priority were begun in the iteration that has ended: alike on all servers."""
        return self._iteration_of_latest >= self.iteration - 1

    def have_failed(self, error: BaseException) -> bool:
        """Whether this is the error of the first step that failed."""
        return self._failed is error

    def wait_for_all(self) -> None:
        """Wait for every step that was begun. Raises the error of the first that failed."""
        self._end(tuple(self._begun))

    def end_iteration(self) -> None:
        """The training function is at a boundary: wait for what was begun before the one before it.

        Raises the error of the first that failed.
        """
        self._end([step for step in self._begun if step.iteration < self.iteration])
        self.iteration += 1

    def end_loop(self) -> None:
        """A loop was left: wait for the steps with a priority. Raises the error of the first that failed."""
        self._end([step for step in self._begun if step.priority is not None])

    def _end(self, steps: Sequence[Pending]) -> None:
        for step in steps:
            self.wait(step)
            step.finish()

    def wait(self, wanted: Pending) -> None:
        """Wait until a step is over, and all before it unless it has a priority; finishes those, in order."""
        while wanted in self._begun:
            first = self._begun[0] if wanted.priority is None else wanted
            self._pace.wait_begins()
            with self._stopwatch:
                self._until_over(first)
            self._pace.wait_ends()
            if first.error is None:
                first.finish()
            self._begun.remove(first)

    def ask(self, function: Callable[[], Any]) -> Any:
        """Let the training thread call a function while it waits; returns the result, or raises the error."""
        if not self.in_worker_thread:
            return function()
        call = self._call = _MainThreadCall(function)
        self._ring()
        outcome = None if self.is_closed else call.bell.get()
        self._call = None
        if outcome is None:
            raise UsageError("the training function ended without waiting for its steps")
        value, error = outcome
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread, once the job has ended or all steps are over. Idempotent."""
        self.is_closed = True
        self._todo.put(None)
        call = self._call
        if call is not None:
            call.bell.put(None)
        if self._thread is not None:
            self._thread.join(_END_S)

    def _until_over(self, step: Pending) -> None:
        while not step.over:
            self._listens = True  # set before it looks: later events wake it
            call = self._call
            if call is not None and not call.over:
                call.run()
            elif not step.over:
                self._bell.get()

    def _ring(self) -> None:
        if self._listens:
            self._listens = False
            self._bell.put(None)

    # --- the thread of the steps -----------------------------------------------------------------

    def _run(self) -> None:
        while self._go_on():
            pass

    def _go_on(self) -> bool:
        """Do one step, or one piece. False: all are done, and no more will begin."""
        chosen = self._next()
        if chosen is None:
            return False
        number, step = chosen
        if self._do(number, step):
            self._order.end(number)
            step.work = None  # the contribution need not be kept any longer
            step.over = True
            self._ring()
        return True  # and hold no step while the thread waits for the next one

    def _next(self) -> tuple[int, Pending] | None:
        """The step of which the next piece is sent; None: all are done, and no more will begin."""
        more = self._take_begun()
        while (chosen := self._order.next()) is None and more:
            more = self._take_begun(waits=True)
        return chosen

    def _take_begun(self, waits: bool = False) -> bool:
        """Take what was begun by now into the order. False: nothing can begin any more."""
        while waits or not self._todo.empty():
            step, waits = self._todo.get(), False
            if step is None:
                self._todo.put(None)
                return False
            self._order.begin(step)
        return True

    def _missing(self) -> list[bool]:
        self._take_begun()
        return self._order.missing()

    def _do(self, number: int, step: Pending) -> bool:
        """Do a step, or its next piece; returns whether the step is over."""
        work = step.work
        assert work is not None
        if self._failed is not None:
            step.error = self._failed
            return True
        try:
            if isinstance(work, Pieces):
                self._order.committed(number, work.step(self._missing))
                return work.over
            step.outcome = work()
            self._order.committed(number)
        except BaseException as error:
            # A next step of this server would be taken for this one by the others.
            step.error = self._failed = error
        return True
