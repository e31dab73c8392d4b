"""What a training function holds: arrays, batches, and one call a step that all servers finish or none.

    def train(session):
        w = session.empty(n, "float32")
        session.state(params=w)
        for batch in session.batches(n_samples, global_batch=288, epochs=3, seed=0):
            g = gradient(w, batch.indices)
            w -= lr * batch.allreduce(g, recompute=lambda indices: gradient(w, indices))

`allreduce_async` begins a step and returns at once: it goes on beside what the training function computes.
Every server must make the same calls in the same order, as with any collective library. A server that joins
later runs the same function: its first training loop (`batches` or `steps`) begins with the state and at the
step at which the others are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from bml.protocol.messages import View
from bml.protocol.reuse import StepMemory
from bml.protocol.workspace import OPS, Array
from bml.train.batches import BatchPlan, GlobalBatch, Indices, assignment, shares, used_indices
from bml.train.communicator import Committed, Communicator
from bml.train.ledger import Ledger, LedgerSummary
from bml.train.pending import Finish, Pending, Steps, Work
from bml.train.snapshot import leaves, restore, snapshot
from bml.train.vectors import Bucket, describe, divide, flatten, unflatten
from topology.errors import UsageError

Arrays = npt.ArrayLike | Sequence[Array]
Recompute = Callable[[Indices], Any]
#: Prepares this server's contribution for the members of a view.
Prepare = Callable[[View], Array]


class _Entry(NamedTuple):
    """What a step of a batch says to the ledger."""

    step: int
    batch: GlobalBatch
    contributors: tuple[int, ...]
    used: dict[int, Indices]


class Session:
    """A server's part in the job; handed to the training function."""

    def __init__(self, communicator: Communicator):
        self._communicator = communicator
        # Not the members of the first view: a server that is lost at start-up may be in one that only
        # some have seen, and all must split the first batch alike.
        self._contributors = communicator.servers
        # Where several arrays are gathered into one vector, step after step.
        self._vectors = StepMemory(communicator.empty)
        self._state: dict[str, Any] = {}
        self._ledger: Ledger | None = None
        self._entry: _Entry | None = None
        self._steps = Steps(communicator.taken)
        self._loops = 0
        self._begins_at: tuple[int, int] | None = None

    @property
    def server(self) -> int:
        """This server's id."""
        return self._communicator.server

    @property
    def joins(self) -> bool:
        """Whether this server came while the job ran: its first training loop begins with the state."""
        return self._communicator.joins

    @property
    def replays(self) -> bool:
        """Whether what this server brings in this iteration of a training loop is not used.

        It joined while the job ran, and is given results that the others have committed without it: of a
        gradient that need not be computed only the shape and dtype count. False on all other servers.
        """
        return self._communicator.replays

    @property
    def view(self) -> View:
        """The view in force: epoch, members, failures, why. UsageError on a joiner that is in none yet."""
        return self._communicator.view

    @property
    def contributors(self) -> tuple[int, ...]:
        """The servers whose contributions are in the last committed step; at first all servers."""
        return self._contributors

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = "float32") -> Array:
        """An uninitialised array of this shape and dtype, in memory that is sent without a copy."""
        return self._communicator.empty(shape, dtype)

    def empty_like(self, array: npt.ArrayLike) -> Array:
        """An uninitialised array with the shape and dtype of `array`."""
        like = np.asarray(array)
        return self._communicator.empty(like.shape, like.dtype)

    def bucket(self, shapes: Sequence[tuple[int, ...]], dtype: npt.DTypeLike = "float32") -> Bucket:
        """Uninitialised arrays of these shapes in one piece of memory, which `allreduce` takes as they are.

        A list of other arrays is gathered into such memory in every step, which costs a copy and the memory.
        Compute into them (`out=`), or keep the gradients in them. `bucket.vector` is all of it, flat.
        """
        sizes = [prod(shape) for shape in shapes]
        vector = self.empty(sum(sizes), dtype)
        bucket = Bucket(
            part.reshape(shape)
            for part, shape in zip(np.split(vector, np.cumsum(sizes)[:-1]), shapes, strict=True)
        )
        bucket.vector = vector
        return bucket

    def state(self, **arrays: Any) -> None:
        """Name what makes up the training state: `params` (its digest proves that all agree), and more.

        Values are arrays, or lists or dicts of arrays, which the training function goes on changing in
        place. A server that joins gets the others' values in its own arrays of the same names.
        """
        self._state.update(arrays)

    def allreduce(self, arrays: Arrays, op: str = "sum", *, shared: bool = False) -> Any:
        """Reduce the arrays of all servers elementwise; everybody gets the same bits in new memory.

        `arrays` is one array, or a list of arrays of one dtype (one step, one commit; a list comes back).
        `op` is sum, min, max or prod. With `shared` the result is read-only, and servers that share memory
        read it where it lies, which saves a copy; it stays valid, and its memory taken, until the last
        array made of it is dropped. The contributions of servers that die on the way are missing from
        the result; `contributors` says whose are in it. Raises StepMismatch when servers call different
        things, and the error that ends the job.

        If the handler of a signal raises out of it, the step goes on: repeat the call, with any contribution,
        and it returns the result of the one brought before. UsageError if another call is made first.
        """
        work, finish = self._collective(arrays, op, shared)
        return self._steps.run(work, finish)  # with a star, a signal's handler could raise after it

    def allreduce_async(self, arrays: Arrays, op: str = "sum", *, shared: bool = False) -> Pending:
        """Begin what `allreduce` does; the handle's `wait` returns the result.

        Steps go one after the other, in the order in which they were begun, which must be the same on every
        server; the blocking calls wait for those before. Arrays must not change until `wait` has returned (a
        list is copied, a `bucket` is not). All must be waited for before a training loop goes on.
        """
        return self._steps.begin(*self._collective(arrays, op, shared))

    def _collective(self, arrays: Arrays, op: str, shared: bool) -> tuple[Work, Finish]:
        if op not in OPS:
            raise UsageError(f"op is {op!r}: give one of {', '.join(OPS)}")
        flat, shapes, dtype = flatten(arrays, self._vectors)
        many = isinstance(arrays, list | tuple)

        def finish(outcome: Committed) -> Any:
            self._contributors = outcome.contributors
            if shared:
                outcome.result.flags.writeable = False
            return unflatten(outcome.result, shapes, many)

        return (
            lambda: self._step(f"allreduce {op}", op, shapes, dtype, lambda view: flat, shared),
            finish,
        )

    def barrier(self) -> None:
        """Return once every live server has called it."""
        self.allreduce(np.empty(0, np.uint8))

    def batches(self, n_samples: int, *, global_batch: int, epochs: int, seed: int = 0) -> Iterator[Batch]:
        """This server's shares of the job's global batches, each a `Batch`; see bml.train.batches.

        Every sample of 0 .. n_samples-1 is used exactly once per epoch, whatever fails. Each batch must
        be ended with its `allreduce`, or several for parts of the gradient, before the next is drawn.
        """
        batches = BatchPlan(n_samples, global_batch, epochs, seed)
        self._ledger = Ledger(n_samples)
        for index in self._loop(len(batches)):
            batch = Batch(self, batches.batch(index))
            yield batch
            if not batch.committed:
                raise UsageError(
                    f"batch {batch.batch_no} of epoch {batch.epoch_no} was not ended: call batch.allreduce"
                )

    def steps(self, n_steps: int) -> Iterator[int]:
        """Count 0 .. n_steps-1, for a training loop that draws its data itself.

        Between two steps the state is whole: a server that joins begins there, so its count starts later.
        It catches up much sooner if it computes nothing while `replays` is True.
        """
        yield from self._loop(n_steps)

    def _loop(self, length: int) -> Iterator[int]:
        loop, index = self._loops, 0
        self._loops += 1
        while True:
            index = self._boundary(loop, index, length)
            if index >= length:
                return
            self._communicator.draw_level()
            yield index
            index += 1

    def _boundary(self, loop: int, index: int, length: int) -> int:
        """Between two steps of a loop: give the state, or take it; returns the step that comes next."""
        if self._steps.pending:
            raise UsageError(
                f"{self._steps.pending} steps were begun and not waited for: call wait() of what "
                "allreduce_async returned before the training loop goes on"
            )
        taken = self._communicator.joined()
        if taken is not None:
            self._take(taken)
        if self._begins_at is not None:
            first_loop, first = self._begins_at
            if loop < first_loop:
                return length
            self._begins_at, index = None, first
        ledger = self._whole_ledger()
        self._communicator.boundary(
            lambda: snapshot(self._state, loop, index, self._contributors, ledger.dump() if ledger else None)
        )
        return index

    def _take(self, state: memoryview) -> None:
        manifest = restore(state, self._state)
        self._contributors = manifest.contributors
        self._begins_at = (manifest.loop, manifest.index)
        self._entry = None  # of a step before that boundary
        if manifest.ledger is not None:
            self._ledger = Ledger.load(manifest.ledger)

    def samples(self) -> LedgerSummary | None:
        """Which samples went into committed steps, by epoch; None before `batches`."""
        ledger = self._whole_ledger()
        return ledger.summary() if ledger else None

    def _whole_ledger(self) -> Ledger | None:
        """With what was reduced last; of a batch in several parts, the last says what was used."""
        entry, self._entry = self._entry, None
        if entry is not None:
            assert self._ledger is not None
            self._ledger.commit(*entry)
        return self._ledger

    def digest(self) -> str:
        """Sha256 of the parameters (`state(params=...)`, or of the whole state if none is called so)."""
        sha = hashlib.sha256()
        for array in leaves(self._state.get("params", self._state)):
            sha.update(np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()

    def _step(
        self,
        call: str,
        op: str,
        shapes: tuple[tuple[int, ...], ...],
        dtype: np.dtype[Any],
        prepare: Prepare,
        shared: bool = False,
    ) -> Committed:
        """Synchronise one step, preparing the contribution anew for every view until it is committed."""
        text, signature = describe(call, dtype, shapes)
        while True:
            view = self._communicator.view
            outcome = self._communicator.sync(view.epoch, prepare(view), op, text, signature, shared)
            if isinstance(outcome, Committed):
                return outcome

    def finish(self) -> None:
        """Wait for steps that were begun; called when the training function has returned."""
        self._steps.wait_for_all()

    def close(self) -> None:
        """End what belongs to the session, once the job is over."""
        self._steps.close()


class Batch:
    """This server's share of one global batch; `indices` (int64) are its samples."""

    def __init__(self, session: Session, whole: GlobalBatch):
        self.committed = False
        self.epoch_no = whole.epoch_no
        self.batch_no = whole.batch_no
        self._session = session
        self._whole = whole
        # Every server has the same contributors of the last step, so all split the batch alike, even
        # while one of them already knows of a new view.
        self._base = session.contributors
        self.indices: Indices = shares(whole.indices, self._base).get(session.server, whole.indices[:0])

    def allreduce(self, gradient: Arrays, recompute: Recompute | None = None) -> Any:
        """The mean over the global batch of what `gradient` sums over `indices`; the step of training.

        `gradient` is one array, or a list of arrays of one dtype. If a server dies first, the survivors
        share its samples: `recompute(indices)` is called in this thread and must return the same sums,
        with the same shapes, over those samples; without it they are left out, and the mean is taken
        over the samples that really contributed. Floating dtypes are kept, integers give float64.
        """
        work, finish = self._reduction(gradient, recompute)
        return self._session._steps.run(work, finish)  # as in Session.allreduce

    def allreduce_async(self, gradient: Arrays, recompute: Recompute | None = None) -> Pending:
        """Begin what `allreduce` does; the handle's `wait` returns the mean, and may call `recompute`.

        For parts of the gradient that are there before the others; each part is a step of its own, with its
        own mean. See `Session.allreduce_async`.
        """
        return self._session._steps.begin(*self._reduction(gradient, recompute))

    def _reduction(self, gradient: Arrays, recompute: Recompute | None) -> tuple[Work, Finish]:
        session, vectors = self._session, self._session._vectors
        flat, shapes, dtype = flatten(gradient, vectors)
        many = isinstance(gradient, list | tuple)
        call = "batch.allreduce" if recompute is None else "batch.allreduce with recompute"

        def more(indices: Indices) -> Array:
            assert recompute is not None
            added, more_shapes, more_dtype = flatten(recompute(indices), vectors)
            if more_shapes != shapes or more_dtype != dtype:
                raise UsageError(
                    f"recompute returned {more_dtype} {more_shapes}, the gradient is {dtype} {shapes}"
                )
            return np.add(flat, added)

        def prepare(view: View) -> Array:
            mine = assignment(self._whole.indices, self._base, view.contributors).get(session.server)
            if recompute is None or mine is None or not len(mine.extra):
                return flat
            return cast(Array, session._steps.ask(lambda: more(mine.extra)))

        def work() -> tuple[Committed, Array]:
            # The sum is only read: the mean takes the place of the result in memory of its own.
            outcome = session._step(call, "sum", shapes, dtype, prepare, shared=True)
            n_used = sum(map(len, self._used(outcome, recompute is not None).values()))
            mean = session._communicator.make(lambda: divide(outcome.result, n_used, session.empty))
            return outcome, mean

        def finish(done: tuple[Committed, Array]) -> Any:
            outcome, mean = done
            session._contributors = outcome.contributors
            used = self._used(outcome, recompute is not None)
            session._entry = _Entry(outcome.step, self._whole, outcome.contributors, used)
            self.committed = True
            return unflatten(mean, shapes, many)

        return work, finish

    def _used(self, outcome: Committed, recomputed: bool) -> dict[int, Indices]:
        """The samples in a sum, by the server that contributed them."""
        assigned = assignment(self._whole.indices, self._base, outcome.contributors)
        return used_indices(assigned, recomputed=recomputed)
