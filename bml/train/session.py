"""What a training function holds: arrays, batches, and one call a step that all servers finish or none.

    def train(session):
        w = session.empty(n, "float32")
        session.state(params=w)
        for batch in session.batches(n_samples, global_batch=288, epochs=3, seed=0):
            g = gradient(w, batch.indices)
            w -= lr * batch.allreduce(g, recompute=lambda indices: gradient(w, indices))

`allreduce_async` begins a step and returns at once: it goes on beside what the training function computes.
Every server must make the same calls in the same order, as with any collective library; calls that differ,
in what they reduce or in where in the program they stand, end the job with StepMismatch. A server that joins
later runs the same function: loops that the others have behind them end at once, and the one in which they
are begins with their state, at their step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.agreement import Prepare, agree
from bml.train.batch import Batch, Recompute
from bml.train.batches import BatchPlan
from bml.train.calls import warn_user
from bml.train.collectives import Collectives
from bml.train.communicator import Committed, Communicator
from bml.train.ledgers import Ledgers, LedgerSummary
from bml.train.pending import Pending
from bml.train.position import Loop
from bml.train.snapshot import manifest_of, restore, snapshot
from bml.train.state import Load, NamedState, Save
from bml.train.vectors import Arrays, Bucket, check_dtype

__all__ = ["Arrays", "Batch", "Recompute", "Session"]


class Session:
    """A server's part in the job; handed to the training function, which calls it from one thread.

    Every call that takes part in steps raises the error that ends the job (`TooFewServers`, `Evicted`,
    `StepMismatch`, `TrainingError` of another server, …); after an exception has left such a call, all later
    ones raise that error again, or `SessionBroken`.
    """

    def __init__(self, communicator: Communicator):
        self._communicator = communicator
        self._collectives = Collectives(communicator)
        self._position = self._collectives.position
        self._state = NamedState()
        self._ledgers = Ledgers()
        self._drawn: tuple[Loop, Batch] | None = None
        self.own_steps = 0
        """Steps that no call of the training function asked for: they made the named state equal."""
        self._warning = ""
        self._given: memoryview | None = None
        """The others' state, on the way to the place in the program where it belongs."""

    @property
    def server(self) -> int:
        """This server's id, from 0 (the rank, in the words of MPI)."""
        return self._communicator.server

    @property
    def joins(self) -> bool:
        """Whether this server came while the job ran: its first training loop begins with their state."""
        return self._communicator.joins

    @property
    def replays(self) -> bool:
        """Whether what this server brings in this iteration of a training loop is not used.

        It joined while the job ran, and is given results that the others have committed without it: of a
        gradient that need not be computed only the shape and dtype count. False on all other servers.
        """
        return self._position.aims or self._communicator.replays

    @property
    def view(self) -> View:
        """The view in force: epoch, members, failures, why. Raises UsageError on a joiner without one."""
        return self._communicator.view

    @property
    def contributors(self) -> tuple[int, ...]:
        """Ids of the servers whose contributions are in the last committed step; at first all servers."""
        return self._collectives.contributors

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
        """An uninitialised array of this shape and dtype, in memory that is sent without a copy.

        Raises UsageError for a negative shape and for a dtype that is not of numbers, FabricError if there is
        no room for shared memory.
        """
        return self._communicator.empty(_checked_shape(shape), _checked_dtype(dtype))

    def empty_like(self, array: npt.ArrayLike) -> Array:
        """An uninitialised array with the shape and dtype of `array`; raises what `empty` raises."""
        like = np.asarray(array)
        return self.empty(like.shape, like.dtype)

    def bucket(self, shapes: Sequence[int | tuple[int, ...]], dtype: npt.DTypeLike = "float32") -> Bucket:
        """Uninitialised arrays of these shapes in one piece of memory, which `allreduce` takes as they are.

        A list of other arrays is gathered into such memory in every step, which costs a copy and the memory.
        Compute into them (`out=`), or keep the gradients in them. `bucket.vector` is all of it, flat.
        Raises UsageError without a shape, and what `empty` raises.
        """
        checked = [_checked_shape(shape) for shape in shapes]
        sizes = [prod(shape) for shape in checked]
        if not sizes:
            raise UsageError("a bucket needs at least one shape")
        vector = self.empty(sum(sizes), dtype)
        bucket = Bucket(
            part.reshape(shape)
            for part, shape in zip(np.split(vector, np.cumsum(sizes)[:-1]), checked, strict=True)
        )
        bucket.vector = vector
        return bucket

    def state(self, **arrays: Any) -> None:
        """Name what makes up the training state: `params` (its digest proves that all agree), and more.

        Values are arrays, or lists or dicts of arrays, which the training function goes on changing in
        place. At the next boundary of a training loop they are made equal on all servers, if they are not:
        everybody takes those of the lowest server. A server that joins gets the others' values in its own
        arrays of the same names. Raises UsageError for anything but writable arrays of numbers.
        """
        self._state.name(arrays)

    def state_fn(self, key: str, load: Load, save: Save) -> None:
        """Name a value of the training state that is no array: `save()` returns it, `load(value)` takes it.

        It may be a number, text, bytes or array, None, or lists and dicts of them (tuples come as lists).
        Raises UsageError for anything else, and what `save` raises, which is called once at once.
        """
        self._state.name_function(key, load, save)

    def allreduce(self, arrays: Arrays, op: str = "sum", *, shared: bool = False) -> Any:
        """Reduce the arrays of all servers elementwise; everybody gets the same bits in new memory.

        `arrays` is one array of any shape, or a list of arrays of one dtype (one step, one commit; a list
        of arrays of these shapes comes back): integers, floats or complex numbers in native byte order.
        `op` is sum, min, max or prod; sums and products of integers have 64 bits, all else keeps its dtype.
        With `shared` the result is read-only, and servers that share memory read it where it lies, which
        saves a copy. Its memory is taken until the last array made of it is dropped. The contributions of
        servers that die on the way are missing from the result; `contributors` says whose are in it.

        Raises UsageError for other arrays or operations, and on a joiner outside of its training loop;
        StepMismatch when servers call different things; the error that ends the job; SessionBroken.
        """
        collectives = self._collectives
        work, finish = collectives.allreduce(arrays, op, shared)
        # Nothing follows the step: a signal's handler that raised after it would lose the result.
        with collectives.calls:
            return collectives.steps.run(work, finish)

    def allreduce_async(self, arrays: Arrays, op: str = "sum", *, shared: bool = False) -> Pending:
        """Begin what `allreduce` does; the handle's `wait` returns the result.

        Steps go one after the other, in the order in which they were begun, which must be the same on every
        server; the blocking calls wait for those before. Arrays must not change until `wait` has returned (a
        list is copied, a `bucket` is not). All must be waited for before a training loop goes on.
        Raises UsageError as `allreduce` does; what goes wrong later is raised by `wait`.
        """
        return self._collectives.begin(*self._collectives.allreduce(arrays, op, shared))

    def barrier(self) -> None:
        """Return once every live server has called it; raises what `allreduce` raises."""
        self.allreduce(np.empty(0, np.uint8), "max")

    def batches(self, n_samples: int, *, global_batch: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """This server's shares of the job's global batches, each a `Batch`; `epochs` passes over the samples.

        Every sample of 0 .. n_samples-1 is used exactly once per epoch, whatever fails. Each batch must
        be ended with its `allreduce`, or several for parts of the gradient, before the next is drawn. All
        servers must give the same numbers. A loop that is left early leaves samples out; `samples` says so.
        Close an iterator that is kept in a variable when it was left by `break`: until then it is open.
        Raises UsageError for numbers that cannot be (see `BatchPlan`) and when a batch was not ended.
        """
        plan = BatchPlan(n_samples, global_batch, epochs, seed)
        loop = self._position.enter(str(plan), len(plan), lambda: self._end_batches(loop))
        for index in self._iterate(loop):
            batch = Batch(self._collectives, plan.batch(index), self._ledgers.open(loop.id, plan))
            self._drawn = (loop, batch)
            yield batch

    def steps(self, n_steps: int) -> Iterator[int]:
        """Count 0 .. n_steps-1, for a training loop that draws its data itself.

        Between two steps the state is whole: a server that joins begins there, so its count starts later.
        It catches up much sooner if it computes nothing while `replays` is True. Raises UsageError if
        `n_steps` is no whole number, and when a step that was begun has not been waited for.
        """
        if isinstance(n_steps, bool) or not isinstance(n_steps, int | np.integer):
            raise UsageError(f"n_steps must be a whole number, it is {n_steps!r}")
        loop = self._position.enter(f"steps({n_steps})", max(int(n_steps), 0), lambda: None)
        yield from self._iterate(loop)

    def samples(self) -> LedgerSummary | None:
        """Which samples went into committed steps, by loop and epoch; None before `batches`.

        A batch that is open, as other parts of it may follow, is not counted.
        """
        return self._ledgers.summary() if len(self._ledgers) else None

    def digest(self) -> str:
        """Sha256 of the parameters (`state(params=...)`, or of all arrays if none is called so).

        The empty text if no array was named.
        """
        return self._state.digest()

    # --- loops -----------------------------------------------------------------------------------

    def _iterate(self, loop: Loop) -> Iterator[int]:
        position = self._position
        try:
            index = 0
            while (index := self._boundary(loop, index)) < loop.length:
                yield index
                index += 1
        finally:
            loop.over, position.known = True, None  # first, and without a call: a handler may raise in one
            position.leave(loop)

    def _boundary(self, loop: Loop, index: int) -> int:
        """Between two steps of a loop: give the state, or take it; returns the step that comes next."""
        collectives = self._collectives
        collectives.calls.check()
        if n_owed := collectives.steps.n_owed:
            raise UsageError(
                f"{n_owed} steps were begun and not waited for: call wait() of everything that "
                "allreduce_async returned before the training loop goes on"
            )
        if self._drawn is not None:
            of, batch = self._drawn
            if of is loop and not batch.is_touched:
                raise UsageError(f"{batch} was not ended: call batch.allreduce before the loop goes on")
            self._close_batch()
        with collectives.calls:
            index = self._pass(loop, index)
        self._warn()
        return index

    def _warn(self) -> None:
        """Outside of calls: a user may have warnings raised."""
        text, self._warning = self._warning, ""
        watched = "" if self._position.aims else self._state.watch(self._collectives.n_steps)
        for each in filter(None, (text, watched)):
            warn_user(each)

    def _close_batch(self) -> None:
        if self._drawn is not None:
            (_, batch), self._drawn = self._drawn, None
            batch.close()

    def _end_batches(self, loop: Loop) -> None:
        """A loop over batches was left: a batch of it that is open will not be committed any more."""
        if self._drawn is not None and self._drawn[0] is loop:
            self._close_batch()
        self._ledgers.close(loop.id)

    def _pass(self, loop: Loop, index: int) -> int:
        taken = self._communicator.joined()
        if taken is not None:
            self._given = taken
            self._position.go_to(manifest_of(taken).path)
        index = self._position.advance(loop, index)
        self._collectives.n_calls = 0
        if self._position.aims:
            return index
        if self._given is not None:
            self._take(self._given)
        if self._state.is_new:
            self._agree_on_state()
        self._communicator.boundary(
            lambda: snapshot(self._state, self._position.path, self.contributors, self._ledgers.dump())
        )
        if index < loop.length:
            self._communicator.draw_level()
        return index

    def _take(self, state: memoryview) -> None:
        manifest = restore(state, self._state)
        self._given, self._collectives.has_begun = None, True
        self._state.is_new = False  # the others have made it equal
        self._collectives.contributors = manifest.contributors
        self._ledgers = Ledgers.load(manifest.ledgers)

    def _agree_on_state(self) -> None:
        collectives = self._collectives

        def step(call: str, op: str, dtype: npt.DTypeLike, size: int, prepare: Prepare) -> Committed:
            done = collectives.step(collectives.describe(call, np.dtype(dtype), ((size,),)), op, prepare)
            self.own_steps += 1  # it is committed: a report counts the others
            return done

        self._warning = agree(self._state, self.server, step)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for steps that were begun; called when the training function has returned.

        Raises what broke the session, and UsageError on a joiner that has not come to where the others are.
        """
        with self._collectives.calls:
            self._collectives.steps.wait_for_all()
            self._position.leave_all()
            if not self._collectives.has_begun:
                raise UsageError(
                    f"server {self.server} joins a running job, and its training function ended before its "
                    "first session.batches or session.steps"
                )

    def close(self) -> None:
        """End what belongs to the session, once the job is over."""
        self._collectives.steps.close()


def _checked_shape(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    """A shape of whole numbers. Raises UsageError, before memory is asked for, which others may share."""
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    except TypeError:
        raise UsageError(f"{shape!r} is no shape: give a whole number, or a tuple of them") from None
    if any(size < 0 for size in sizes):
        raise UsageError(f"{shape!r} is no shape: it has a negative size")
    return sizes


def _checked_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"{dtype!r} is no dtype: {error}") from None
    check_dtype(found)
    return found
