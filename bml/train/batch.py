"""A server's share of one global batch, and the steps that make the mean of its gradient.

The gradient is reduced in one part or several. A batch is open until its parts are committed, and abandoned
if its loop is left before. Until then the arrays that were given belong to the library: they are sent without
a copy, and again if the view changes. They are copied before `recompute` may write into the same memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import numpy as np

from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.batches import (
    EQUAL,
    Assignment,
    GlobalBatch,
    Indices,
    Weights,
    assignment,
    shares,
    used_indices,
)
from bml.train.collectives import CHANGED, Collectives
from bml.train.communicator import Committed
from bml.train.ledger import Ledger
from bml.train.pending import Pending, Then
from bml.train.priority.pieces import Pieces, checked_priority, in_words
from bml.train.vectors import Arrays, Ready, check_not_copied, divide, flatten, given_back, unflatten

Recompute = Callable[[Indices], Any]


class Batch:
    """This server's share of one global batch; `Session.batches` makes it.

    It is open until its gradient is committed, or until the loop goes on or is left without that. Once the
    loop has gone on, parts with a priority may still be under way: it is committed with the last of them.
    """

    def __init__(
        self, collectives: Collectives, whole: GlobalBatch, ledger: Ledger, weights: Weights = EQUAL
    ):
        self.epoch_no = whole.epoch_no
        """The epoch (pass over the samples) to which it belongs, from 0."""
        self.batch_no = whole.batch_no
        """Its number within that epoch, from 0."""
        self.whole = whole
        """The global batch of which it is a share."""
        # Every server has the same contributors of the last step, so all split the batch alike, even
        # while one of them already knows of a new view.
        self.base = collectives.contributors
        self.weights = weights  # those that all servers have agreed on
        server = collectives.communicator.server
        self.indices: Indices = shares(whole.indices, self.base, weights).get(server, whole.indices[:0])
        """The samples of this server: int64, shape (n,). Empty if there are more servers than samples, and on
        a joiner that is still given results of the others."""
        self._collectives = collectives
        self._ledger = ledger
        self._parts: list[_Part] = []
        self._begun: list[Pending] = []
        self._state = "open"
        self._used: tuple[int, tuple[int, ...], dict[int, Indices]] | None = None

    def __str__(self) -> str:
        return f"batch {self.batch_no} of epoch {self.epoch_no}"

    @property
    def committed(self) -> bool:
        """Whether all parts of its gradient are committed."""
        return self._state == "committed"

    def allreduce(self, gradient: Arrays, recompute: Recompute | None = None, *, early: bool = False) -> Any:
        """Reduce the gradient of this share to the mean over the global batch: the step of training.

        `gradient` is the sum over the samples `indices`: one array, or a list of arrays of one dtype. The
        mean has the same shapes. If a server dies first, the survivors share its samples:
        `recompute(indices)` is called in this thread, and must return sums of the same shapes over those
        samples, with the parameters with which the batch began. Without `recompute` the samples are left out,
        and the mean is taken over the samples that contributed. Floating dtypes are kept, integers give
        float64.

        With `early` the batch stays open for further parts. Until the last of them is committed, `recompute`
        needs the old parameters: keep them. Raises UsageError on a batch that is not open and for a wrong
        result of `recompute`, and the errors of `Session.allreduce`.
        """
        part = self._part(gradient, recompute)

        def finish(done: _Done) -> Any:
            mean = part.finish(done)
            self._end_part(early)
            return mean

        return self._collectives.run(part.work, finish)

    def allreduce_async(
        self,
        gradient: Arrays,
        recompute: Recompute | None = None,
        *,
        early: bool = False,
        ready: Ready | None = None,
        priority: int | None = None,
        then: Then | None = None,
    ) -> Pending:
        """Begin an `allreduce`, and return a handle whose `wait` returns the mean, and may call `recompute`.

        It is meant for parts of the gradient that are ready before the others. Each part is a step of its
        own, with its own mean. `wait` returns when all parts that were begun are committed: no parameter
        changes while another part may still have to be computed again. With `early` it returns when this
        part is committed, see `allreduce`. For `ready`, `priority` and `then` see `Session.allreduce_async`.
        With a priority, too, `wait` returns when this part is committed, and may come when the loop has gone
        on to the next batch. Keep the old parameters for `recompute` until the batch is `committed`. Raises
        UsageError on a batch that is not open.
        """
        part = self._part(gradient, recompute, ready, checked_priority(priority, then))
        if priority is not None:
            followed = self._collectives.followed_by(part.finish_pieces, then)
            return self._collectives.begin(part.pieces(), followed, None, priority)

        def finish(done: _Done) -> Any:
            mean = part.finish(done)
            self._end_part(early or self._parts[-1] is not part)
            return mean

        begun = self._collectives.begin(part.work, finish, None if early else self._begun)
        self._begun.append(begun)
        return begun

    def go_on(self) -> None:
        """The loop goes on: no further part begins, and it is committed with the last that is under way."""
        if not self.is_ended:
            self.close()
        elif self._state == "open":
            self._state = "whole"
            self.commit_if_whole()

    def commit_if_whole(self) -> None:
        """Commit it if no further part can begin, and all are committed."""
        if self._state == "whole" and all(part.committed for part in self._parts):
            self._commit()

    def close(self) -> None:
        """Close the batch. If a part of it is not committed, its samples are left out."""
        if self._state not in ("open", "whole"):
            return
        if self._used is not None and all(part.committed for part in self._parts):
            self._commit()
        else:
            self._state = "abandoned"
            self._ledger.leave_out(self.whole)

    @property
    def is_ended(self) -> bool:
        """Whether at least one part of it is committed, or has a priority and is under way."""
        return self._used is not None or any(part.priority is not None for part in self._parts)

    def leave_untimed(self) -> None:
        """Its time says nothing of this server's speed: it has done what it does in few batches."""
        self._collectives.stopwatch.start(0)

    def _part(
        self,
        gradient: Arrays,
        recompute: Recompute | None,
        ready: Ready | None = None,
        priority: int | None = None,
    ) -> _Part:
        self._collectives.admit()
        if self._state != "open":
            raise UsageError(
                f"{self} is {self._state}: begin all parts with allreduce_async before you wait "
                "for one, or give early=True to all parts but the last"
                if self.committed
                else f"{self} takes no further part: its loop has gone on"
                if self._state == "whole"
                else f"{self} was abandoned: its loop went on, or ended, before it was committed"
            )
        part = _Part(self, self._collectives, gradient, recompute, ready, priority)
        self._parts.append(part)
        self._collectives.under_way.append(part)
        return part

    def _end_part(self, more_follow: bool) -> None:
        if not more_follow and self._state == "open":
            self._commit()

    def _commit(self) -> None:
        assert self._used is not None
        self._state = "committed"
        step, contributors, used = self._used
        self._ledger.commit(step, self.whole, contributors, used)
        took_part = self._collectives.communicator.server in contributors
        self._collectives.throughput.batch(len(contributors), sum(map(len, used.values())), took_part)
        self._parts.clear()
        self._begun.clear()

    def record(self, done: _Done) -> None:
        """Record a part that is committed. Of several parts, the samples of the last one count."""
        if self._used is None or done.step > self._used[0]:  # servers may wait for parts in other orders
            self._used = (done.step, done.contributors, done.used)

    def used(self, outcome: Committed, recomputed: bool) -> dict[int, Indices]:
        """Return the samples in a sum, by the server that contributed them."""
        assigned = self.assigned(outcome.contributors)
        return used_indices(assigned, recomputed=recomputed)

    def assigned(self, contributors: Iterable[int]) -> dict[int, Assignment]:
        """Divide its samples among those of its servers that are left, and others that joined since."""
        return assignment(self.whole.indices, self.base, contributors, self.weights)


class _Done(NamedTuple):
    """A part that is committed: the samples in it by server, and its mean.

    The sum is not kept: the next steps get its memory, also before this one is waited for.
    """

    step: int
    contributors: tuple[int, ...]
    used: dict[int, Indices]
    mean: Array


class _Part:
    """One part of a batch's gradient, from the user's memory to the mean."""

    def __init__(
        self,
        batch: Batch,
        collectives: Collectives,
        gradient: Arrays,
        recompute: Recompute | None,
        ready: Ready | None,
        priority: int | None,
    ):
        self.committed = False
        self.priority = priority
        self._batch = batch
        self._collectives = collectives
        self._recompute = recompute
        empty = collectives.communicator.empty
        self._flat, self._shapes, self._dtype = flatten(gradient, empty, widened=True)
        if self._dtype.kind == "b":
            raise UsageError("a gradient of dtype bool has no mean: give numbers")
        self._many = isinstance(gradient, list | tuple)
        self._is_aside = False
        self._recomputed: tuple[tuple[int, ...], Array] | None = None
        self._pieces: Pieces | None = None
        self._ready = ready
        self._check_sum = 0
        if ready is None:
            self._note()
            collectives.stopwatch.stop()
        else:
            check_not_copied(gradient, self._flat)
        call = "batch.allreduce" if recompute is None else "batch.allreduce with recompute"
        call += in_words(priority)
        self._described = collectives.describe(call, self._dtype, self._shapes)

    def set_aside(self) -> None:
        """Copy the contribution, once: the user's memory may change from here on."""
        if not self._is_aside and not self.committed:
            self._await()
            self._flat, self._is_aside = self._flat.copy(), True

    def work(self) -> _Done:
        """Synchronise the part, in the thread that waits for the step."""
        # The sum may be shared memory, which is only read: `divide` writes the mean into new memory then.
        outcome = self._collectives.step(self._described, "sum", self._prepare, shared=True)
        used = self._batch.used(outcome, self._recompute is not None)
        n_used = sum(map(len, used.values()))
        mean = divide(outcome.result, n_used, self._collectives.communicator.empty)
        return _Done(outcome.step, outcome.contributors, used, given_back(mean, self._dtype))

    def pieces(self) -> Pieces:
        """The part as steps that others may overtake."""
        collectives, flat = self._collectives, self._flat
        is_mean_of = flat.dtype if np.issubdtype(flat.dtype, np.inexact) else np.dtype(np.float64)
        self._mean = collectives.communicator.empty(flat.size, is_mean_of)
        self._pieces = Pieces(
            collectives, self._described, "sum", self._prepare, self._take, flat.size, flat.dtype
        )
        return self._pieces

    def _take(self, outcome: Committed, start: int, stop: int, total: Array) -> None:
        used = self._batch.used(outcome, self._recompute is not None)
        divide(total, sum(map(len, used.values())), np.empty, out=self._mean[start:stop])
        self._done = _Done(outcome.step, outcome.contributors, used, self._mean)

    def finish_pieces(self, _: None) -> Any:
        """Return the user's result of a part that was reduced in pieces, in the training thread."""
        done = self._done
        mean = self.finish(done._replace(mean=given_back(done.mean, self._dtype)))
        # The pieces refer to this part: as a cycle they would keep the mean until Python looks for cycles.
        del self._pieces, self._mean, self._done
        self._batch.commit_if_whole()
        return mean

    def finish(self, done: _Done) -> Any:
        """Return the user's result, in the training thread."""
        if self._collectives.debug and zlib.crc32(self._flat.data) != self._check_sum:
            raise UsageError(CHANGED.format(what=f"the gradient of {self._batch}"))
        self.committed = True
        self._flat = np.empty(0, self._dtype)  # its memory is the user's again, or free
        self._recomputed = None
        self._collectives.under_way.remove(self)
        self._collectives.note(done.step, done.contributors, self._pieces)
        self._batch.record(done)
        return unflatten(done.mean, self._shapes, self._many)

    def _await(self) -> None:
        """Wait, once, until the contribution may be read. The part before may have to be set aside sooner."""
        if self._ready is not None:
            self._ready()
            self._ready = None
            self._note()
            self._collectives.stopwatch.stop()

    def _note(self) -> None:
        """Take the check sum of the contribution, if changes are looked for."""
        if self._collectives.debug:
            self._check_sum = zlib.crc32(self._flat.data)

    def _prepare(self, view: View) -> Array:
        self._await()
        batch, server = self._batch, self._collectives.communicator.server
        mine = batch.assigned(view.contributors).get(server)
        if self._recompute is None or mine is None or not len(mine.extra):
            return self._flat
        if self._recomputed is None or self._recomputed[0] != view.contributors:
            whole = cast(Array, self._collectives.steps.ask(lambda: self._with(mine.extra)))
            self._recomputed = (view.contributors, whole)
        return self._recomputed[1]

    def _with(self, extra: Indices) -> Array:
        """Return the contribution plus that of samples whose server was lost, in the training thread."""
        recompute = self._recompute
        assert recompute is not None
        for part in self._collectives.under_way:  # recompute may write into the same memory
            part.set_aside()
        self._collectives.throughput.n_recomputed += len(extra)
        recomputed = self._collectives.calls.compute(lambda: recompute(extra))
        added, shapes, dtype = flatten(recomputed, self._collectives.communicator.empty, widened=True)
        if shapes != self._shapes or dtype != self._dtype:
            raise UsageError(
                f"recompute returned {dtype} arrays of shapes {shapes}, "
                f"the gradient is {self._dtype} of shapes {self._shapes}"
            )
        with np.errstate(all="ignore"):  # an overflow is a result, also if the user has numpy raise
            return np.add(self._flat, added)
