"""The session: the object through which a training function gets arrays and batches, and calls collectives.

    def train(session):
        w = session.empty(n, "float32")
        session.state(params=w)
        for batch in session.batches(n_samples, global_batch=288, epochs=3, seed=0):
            g = gradient(w, batch.indices)
            w -= lr * batch.allreduce(g, recompute=lambda indices: gradient(w, indices))

`allreduce_async` begins a step and returns at once: the step goes on while the training function computes.
Every server must make the same calls in the same order, as with any collective library. Calls that differ in
their arguments, or in their place in the program, end the job with StepMismatch. A server that joins later
runs the same function: loops that the others have finished end at once, and the loop in which the others are
begins with their state, at their step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.agreement import agree
from bml.train.balancing.throughput import Throughput
from bml.train.batch import Batch, Recompute
from bml.train.batches import EQUAL, BatchPlan, Weights
from bml.train.calls import warn_user
from bml.train.collectives import Collectives
from bml.train.communicator import Communicator
from bml.train.keeping.files import Files
from bml.train.keeping.resuming import Resumed
from bml.train.keeping.stores import files_of
from bml.train.keeping.whole_state import WholeState
from bml.train.ledgers import LedgerSummary
from bml.train.operations.calls import CollectiveCalls
from bml.train.operations.reducing import allreduce, allreduce_in_pieces
from bml.train.pending import Pending, Then
from bml.train.position import Loop
from bml.train.priority.pieces import checked_priority
from bml.train.state import Load, Save
from bml.train.vectors import Arrays, Bucket, Ready, checked_count, checked_dtype, checked_shape

__all__ = ["Arrays", "Batch", "Recompute", "Session"]


class Session(CollectiveCalls):
    """A server's part in the job. The training function is given it, and calls it from one thread.

    Every call that takes part in steps raises the error that ends the job (`TooFewServers`, `Evicted`,
    `StepMismatch`, `TrainingError` of another server, …). After an exception has left such a call, all later
    ones raise that error again, or `SessionBroken`.
    """

    def __init__(self, communicator: Communicator):
        self._communicator = communicator
        super().__init__(Collectives(communicator))
        self._position = self._collectives.position
        self._whole = WholeState(self._collectives)
        self._state = self._whole.named
        self._drawn: tuple[Loop, Batch] | None = None
        self._warning = ""

    @property
    def server(self) -> int:
        """This server's id, from 0 (the rank, in the words of MPI)."""
        return self._communicator.server

    @property
    def n_servers(self) -> int:
        """How many servers the fabric has, lost and absent ones too (the world size, in the words of MPI)."""
        return self._collectives.n_servers

    @property
    def joins(self) -> bool:
        """Whether this server joined while the job ran: its first loop begins with the others' state."""
        return self._communicator.joins

    @property
    def replays(self) -> bool:
        """Whether the contribution of this server is not used in this iteration of a training loop.

        True on a server that joined while the job ran, as long as it is given results that the others
        committed without it. Only shapes and dtypes of its gradients matter then: it need not compute them.
        """
        return (self.joins and self._position.aims) or self._communicator.replays

    @property
    def view(self) -> View:
        """The view in force: epoch, members, failures, why. Raises UsageError on a joiner without one."""
        return self._communicator.view

    @property
    def contributors(self) -> tuple[int, ...]:
        """Ids of the servers whose contributions are in the last step waited for; at first all servers."""
        return self._collectives.contributors

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
        """An uninitialised array of this shape and dtype, in memory that is sent without a copy.

        Raises UsageError for a negative shape and for a dtype that is not of numbers, FabricError if there is
        no room for shared memory.
        """
        return self._communicator.empty(checked_shape(shape), checked_dtype(dtype))

    def empty_like(self, array: npt.ArrayLike) -> Array:
        """An uninitialised array with the shape and dtype of `array`; raises what `empty` raises."""
        like = np.asarray(array)
        return self.empty(like.shape, like.dtype)

    def bucket(self, shapes: Sequence[int | tuple[int, ...]], dtype: npt.DTypeLike = "float32") -> Bucket:
        """Uninitialised arrays of these shapes, one after the other in memory; `allreduce` copies none.

        A list of other arrays is gathered into such memory in every step, which costs a copy and the memory.
        Compute into the arrays (`out=`), or keep the gradients in them. `bucket.vector` has all of them as
        one flat array. Raises UsageError without a shape, and what `empty` raises.
        """
        return Bucket.of([checked_shape(shape) for shape in shapes], lambda size: self.empty(size, dtype))

    def state(self, **arrays: Any) -> None:
        """Name the arrays of the training state: `params`, whose digests are compared at the end, and others.

        Values are arrays, or lists or dicts of arrays, which the training function goes on changing in
        place. If they differ between servers at the next boundary of a training loop, every server takes
        those of the lowest server. A server that joins is given the others' values in its own arrays of the
        same names. Raises UsageError for anything but writable arrays of numbers.
        """
        self._state.name(arrays)

    def state_fn(self, key: str, load: Load, save: Save) -> None:
        """Name a value of the training state that is no array: `save()` returns it, `load(value)` sets it.

        It may be a number, text, bytes or array, None, or lists and dicts of them (tuples become lists).
        `save` is called once at once. Raises UsageError for other values, and what `save` raises.
        """
        self._state.name_function(key, load, save)

    def checkpoint(self, directory: str | PathLike[str] | Files, every: int = 100, keep: int = 3) -> None:
        """Write the training state to a folder, or URL, at a boundary of a loop after every so many steps.

        Each server writes a part, beside the training. `bml run --resume` or `launch(resume=…)` goes on from
        the newest whole checkpoint, on any number of servers. The newest `keep` stay. All servers call
        it alike before the first loop; it replaces what `launch` was given. What cannot be written is a
        warning. Raises UsageError for numbers out of range, in a loop, and for a folder of another job.
        """
        if self._position.is_inside:
            raise UsageError("session.checkpoint is called before the first loop, this is inside of one")
        self._communicator.show_checkpoints(self._whole.keep(files_of(directory), every, keep))

    def resume(self, resumed: Resumed) -> None:
        """Go on from a checkpoint; the launcher calls it, before the training function."""
        self._whole.resume(resumed)

    def allreduce(self, arrays: Arrays, op: str = "sum", *, shared: bool = False, out: Any = None) -> Any:
        """Reduce the arrays of all servers elementwise; every server gets the same bits in new memory.

        `arrays` is one array of any shape, or a list of arrays of one dtype (one step, one commit; a list
        of arrays of these shapes comes back): integers, floats, bfloat16, complex numbers or bool in native
        byte order. `op` is sum, avg (the mean over the contributors), min, max or prod. Sums and products of
        integers have 64 bits, others keep the dtype; of bool, sum and max are "or", prod and min are "and".
        With `shared` the result is read-only, and servers that share memory read it where it lies, which
        saves a copy. Its memory is in use until the last array made of it is dropped. `out`, an array or a
        list of arrays of these shapes, takes the result and is returned; it may be `arrays` itself, and is
        written after the commit. The contributions of servers that die during the step may be missing from
        the result; `contributors` has those in it.

        Raises UsageError for other arrays or operations, and on a joiner outside of its training loop;
        StepMismatch when servers call different collectives; the error that ends the job; SessionBroken.
        """
        collectives = self._collectives
        work, finish = allreduce(collectives, arrays, op, shared, out)
        # Nothing follows the step: a signal's handler that raised after it would lose the result.
        with collectives.calls:
            return collectives.steps.run(work, finish)

    def allreduce_async(
        self,
        arrays: Arrays,
        op: str = "sum",
        *,
        shared: bool = False,
        out: Any = None,
        ready: Ready | None = None,
        priority: int | None = None,
        then: Then | None = None,
    ) -> Pending:
        """Begin an `allreduce`, and return a handle whose `wait` returns the result.

        Steps go one after the other, in the order in which they were begun, which must be the same on every
        server. Blocking calls wait for the steps that were begun before. Arrays must not change until `wait`
        has returned (a list is copied, a `bucket` is not). Wait for all before a training loop goes on.

        `ready()` is for memory that something else is still writing, such as copies from an accelerator: it
        is called once, and the arrays are not read before it has returned. A thread of the library calls it
        or, where a server was lost, the training thread inside of any `wait`; so it must not wait for
        anything that the training thread would do later. What it raises is the error of the step. `arrays`
        is a `bucket` or one contiguous array then, of a dtype that is reduced as it is.

        With a `priority`, a whole number, the array is sent in pieces, each a step with its own contributors;
        those of a lower number are sent sooner. Steps without one neither overtake nor are overtaken. `wait`
        waits for this step alone, and may come one iteration later: a loop that goes on waits for what was
        begun before the iteration that ends. `then(result)` is called once, in the training thread: in
        `wait`, or sooner, where the session waits: when a loop goes on or ends, and at a boundary at which a
        joiner is given the state. Let it, not the caller of `wait`, change the named state.

        Raises UsageError as `allreduce` does, and for other arrays with `ready`; `wait` raises later errors.
        """
        collectives = self._collectives
        if checked_priority(priority, then) is None:
            return collectives.begin(*allreduce(collectives, arrays, op, shared, out, ready))
        pieces, finish = allreduce_in_pieces(collectives, arrays, op, out, ready, priority)
        return collectives.begin(pieces, collectives.followed_by(finish, then), None, priority)

    def barrier(self) -> None:
        """Return once every live server has called it; raises what `allreduce` raises."""
        self.allreduce(np.empty(0, np.uint8), "max")

    def batches(
        self, n_samples: int, *, global_batch: int, epochs: int, seed: int = 0, balance: bool = False
    ) -> Iterator[Batch]:
        """Iterate over this server's shares of the global batches, each a `Batch`, in `epochs` epochs.

        Every sample of 0 .. n_samples-1 is used exactly once per epoch, also when servers fail. Each batch
        must be ended with its `allreduce`, or several for parts of the gradient, before the next is drawn.
        With `balance` servers that compute slower get smaller shares: every 8 batches a small step compares
        their times per sample. All servers must give the same numbers. A loop that is left early leaves
        samples out; `samples` says so. If the iterator is kept in a variable, close it after `break`: until
        then the loop is open. Raises UsageError for wrong numbers (`BatchPlan`) and if a batch was not ended.
        """
        plan = BatchPlan(n_samples, global_batch, epochs, seed, balance)
        loop = self._position.enter(str(plan), len(plan), lambda: self._end_batches(loop, plan))
        for index in self._iterate(loop):
            weights = self._weights(plan) if plan.balance else EQUAL
            ledger = self._whole.ledgers.open(loop.id, plan)
            batch = Batch(self._collectives, plan.batch(index), ledger, weights)
            self._drawn = (loop, batch)
            if plan.balance:  # a small batch is not timed: what it takes besides its samples counts for more
                is_whole = len(batch.whole.indices) == plan.largest
                self._collectives.stopwatch.start(len(batch.indices) if is_whole else 0)
            yield batch

    def steps(self, n_steps: int) -> Iterator[int]:
        """Iterate over 0 .. n_steps-1, for a training loop that draws its data itself.

        Between two steps the state is consistent: a server that joins begins there, so its count starts
        later. It catches up sooner if it computes nothing while `replays` is True. Raises UsageError if
        `n_steps` is not a whole number, and when a step that was begun has not been waited for.
        """
        length = checked_count(n_steps, "n_steps")
        loop = self._position.enter(f"steps({n_steps})", length, self._collectives.end_loop)
        yield from self._iterate(loop)

    def samples(self) -> LedgerSummary | None:
        """Return which samples are in committed steps, by loop and epoch; None before `batches`.

        An open batch is not counted, as other parts of it may follow.
        """
        return self._whole.ledgers.summary() if len(self._whole.ledgers) else None

    def digest(self) -> str:
        """Return the sha256 of the parameters: of `params` of the state, or else of all its arrays.

        Waits for what was begun. Returns an empty text if no array was named.
        """
        self._collectives.settle()
        return self._state.digest()

    def nan(self) -> list[str]:
        """Return the names of the parameters' arrays that hold NaN; the parameters as of `digest`."""
        return self._state.nan()

    @property
    def throughput(self) -> Throughput:
        """The committed steps by the number of servers that contributed, for the report and the status."""
        return self._collectives.throughput

    # --- loops -----------------------------------------------------------------------------------

    def _iterate(self, loop: Loop) -> Iterator[int]:
        position = self._position
        try:
            index = 0
            while (index := self._boundary(loop, index)) < loop.length:
                yield index
                index += 1
        finally:
            loop.over, position.known = True, None  # first, and without a call: a signal's handler may raise
            position.leave_here(loop)

    def _boundary(self, loop: Loop, index: int) -> int:
        """Pass the boundary between two steps of a loop, and return the index of the next step."""
        collectives = self._collectives
        collectives.calls.check()
        collectives.steps.check_none_is_owed()
        if self._drawn is not None:
            of, batch = self._drawn
            if of is loop and not batch.is_ended:
                raise UsageError(f"{batch} was not ended: call batch.allreduce before the loop goes on")
        keeper = self._whole.keeper
        with collectives.calls:
            collectives.end_iteration()
            is_due = keeper is not None and self._whole.given is None and keeper.is_due()
            if drains := is_due or self._must_drain(loop, index):
                collectives.drain()
        self._close_batch(drains)
        with collectives.calls:
            index = self._pass(loop, index, drains, is_due)
        self._warn()
        return index

    def _must_drain(self, loop: Loop, index: int) -> bool:
        """Whether nothing may be under way at this boundary, of which all servers decide alike.

        A server that leaves drains alone: the others wait for what it has not begun. A loop begins and ends
        with nothing under way, and a server is given the state, or made equal, in such a moment alone.
        """
        collectives = self._collectives
        return (
            not collectives.steps.may_be_under_way
            or not 0 < index < loop.length
            or not self._position.is_innermost(loop)
            or collectives.wants_state
            or self._state.is_new
            or (self._communicator.leaves and not self.replays)
        )

    def _warn(self) -> None:
        """Show warnings, outside of calls: the user may have turned warnings into exceptions."""
        text, self._warning = self._warning, ""
        watched = "" if self._position.aims else self._state.watch(self._collectives.n_steps)
        for each in (text, watched, self._whole.keeper.writer.news() if self._whole.keeper else ""):
            warn_user(each)

    def _close_batch(self, is_over: bool = True) -> None:
        if self._drawn is not None:
            (_, batch), self._drawn = self._drawn, None
            batch.close() if is_over else batch.go_on()

    def _end_batches(self, loop: Loop, plan: BatchPlan) -> None:
        """Close the open batch and the ledger of a loop over batches that was left."""
        self._collectives.end_loop()
        if self._drawn is not None and self._drawn[0] is loop:
            self._close_batch()
        self._whole.ledgers.close(loop.id, plan)

    def _pass(self, loop: Loop, index: int, drained: bool, is_due: bool) -> int:
        whole, taken = self._whole, self._communicator.joined() if drained else None
        if taken is not None:
            whole.join(taken)
        index = self._position.advance(loop, index)
        self._collectives.begin_iteration()
        if not drained or (self._position.aims and self.joins):
            return index
        if whole.given is not None and not self._position.aims:
            whole.take()
        if self._state.is_new:
            self._warning = agree(self._state, self.server, self._collectives.own_step)
            whole.prepare()
        if self._position.aims:
            return index
        if is_due and taken is None and whole.keeper is not None:
            whole.keeper.pass_due(whole.snapshot)
        whole.pass_on()
        if index < loop.length:
            self._communicator.begin_iteration()
        return index

    def _weights(self, plan: BatchPlan) -> Weights:
        with self._collectives.calls:
            return self._whole.balancer.next_batch(plan)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for steps that were begun, and a checkpoint that is being written; the function has returned.

        Raises the exception that broke the session, and UsageError on a joiner that missed the others' loop.
        """
        with self._collectives.calls:
            self._collectives.steps.wait_for_all()
            self._position.leave_all()
            self._collectives.check_has_begun()
        self._whole.settle()

    def close(self) -> None:
        """End the threads of the session, once the job is over."""
        self._collectives.steps.close()
        self._whole.close()
