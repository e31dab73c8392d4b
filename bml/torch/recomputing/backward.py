"""One backward pass of DDP: the buckets of its gradients, and what lost ranks would have brought to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bml.torch.attached.recompute import Recompute
from bml.torch.process_group import BACKWARD, ProcessGroup
from bml.torch.recomputing.passes import Drawn
from bml.torch.recomputing.plan import extra_of
from bml.torch.recomputing.training_thread import TrainingThread
from bml.torch.reductions import reduction
from bml.torch.steps import GroupSteps, Vector
from bml.torch.tensors import Tensor, describe, norm
from bml.torch.work import GroupWork
from bml.train.batches import Indices, shares

Wanted = list[tuple[Drawn, Indices]]
"""Places to compute, by batch."""
Order = tuple[int, ...]
"""Dimensions of a parameter, from the outermost in memory to the innermost."""


class Backward:
    """The gradients of some batches. Methods are called in the training thread, unless they say otherwise."""

    def __init__(
        self, group: ProcessGroup, recompute: Recompute, numbers: dict[int, int], drawn: list[Drawn]
    ):
        self._group = group
        self._recompute = recompute
        self._numbers = numbers
        """The number of each parameter, by id."""
        self._drawn = drawn
        self._thread = TrainingThread()
        self._works: list[GroupWork] = []
        self._norms: list[float] = []
        self._added: dict[tuple[int, ...], list[Tensor] | None] = {}
        """What this rank computes of lost ranks, by those that contribute."""
        self.is_computing = False
        """Whether the user's loss is being called."""
        self.contributors: tuple[int, ...] = ()
        """The ranks whose parts are in the last bucket."""
        which = [each.whole.batch_no for each in drawn]
        self._text = f"gradients of batches {which} of pass {drawn[0].whole.epoch_no}"

    def begin(self) -> None:
        """Compute the samples of ranks that are lost already: mostly there are no others."""
        self._compute_for(self._group.contributors)

    def add(self, bucket: Any, measures: bool) -> Any:
        """Begin to reduce a bucket; returns a torch.futures.Future of its buffer, with means over the ranks.

        With `measures` the norm of what this rank contributes is noted. Raises UsageError for a bucket that
        cannot be reduced, such as a sparse one.
        """
        buffer = bucket.buffer()
        within = [(self._numbers[id(each)], bucket_order(each)) for each in bucket.parameters()]
        job = self._job(buffer, within)  # refuses what cannot be reduced
        if measures:
            self._norms.append(norm(buffer.float()))
        work = self._group.begin(BACKWARD, [buffer], job)
        self._works.append(work)
        self._thread.serve()
        return work.get_future().then(lambda done: done.value()[0])

    def finish(self) -> None:
        """Wait for all buckets, and compute what is asked for meanwhile. Raises the first error."""
        self._thread.wait_for(self._works)

    def leave(self) -> None:
        """Compute nothing any more: the backward pass ended with an error."""
        self._thread.leave()

    def norms(self) -> tuple[float, float]:
        """The norm of this rank's gradients, and that of the same gradients by the user's loss."""
        rank = self._group.rank()
        own = self._summed([(each, _own(each, rank)) for each in self._drawn])
        return math.hypot(*self._norms), math.hypot(*map(norm, own or []))

    def _job(self, buffer: Tensor, within: Sequence[tuple[int, Order]]) -> Callable[[GroupSteps], None]:
        """Reduces a bucket in the thread of the group. It has the parameters `within`, in these orders."""
        how = reduction(dist.ReduceOp.SUM, [buffer], BACKWARD)
        text = f"{self._text} {describe([buffer])}"

        def job(steps: GroupSteps) -> None:
            own = how.vector(steps, [buffer])

            def prepare(contributors: tuple[int, ...]) -> Vector:
                if contributors not in self._added and self._wanted(contributors):
                    self._thread.ask(lambda: self._compute_for(contributors))
                added = self._added.get(contributors)
                if added is None:
                    return own
                flat = torch.cat([_laid(added[number], order) for number, order in within])
                with np.errstate(all="ignore"):  # an overflow is a result, also if the user has numpy raise
                    made: Vector = np.add(own, flat.numpy())
                return made

            done = steps.step(text, how.op, prepare)
            self.contributors = done.contributors
            with np.errstate(all="ignore"):
                how.store(np.divide(done.result, done.result.dtype.type(steps.n_ranks)), [buffer])

        return job

    def _wanted(self, contributors: tuple[int, ...]) -> Wanted:
        """What this rank computes if these contribute, beside what its gradients have."""
        n_ranks, rank = self._group.size(), self._group.rank()
        found: Wanted = []
        for each in self._drawn:
            extra = extra_of(each.whole, n_ranks, contributors, rank)
            if len(extra):
                found.append((each, extra))
            if not each.is_ours and rank in contributors:
                found.append((each, _own(each, rank)))
        return found

    def _compute_for(self, contributors: tuple[int, ...]) -> None:
        if contributors not in self._added:
            self._added[contributors] = self._summed(self._wanted(contributors))

    def _summed(self, wanted: Wanted) -> list[Tensor] | None:
        """The gradients of the loss over all places, where a batch counts as much as on its own rank."""
        total: list[Tensor] | None = None
        self.is_computing = True
        try:
            for drawn, places in wanted:
                whole = drawn.whole
                again = self._recompute.of_batch(whole.epoch_no, whole.step, drawn.shares.fetch)
                found = [_widened(each) * (len(places) / drawn.share_size) for each in again(places)]
                total = found if total is None else torch._foreach_add(total, found)
        finally:
            self.is_computing = False
        return total


def bucket_order(parameter: Tensor) -> Order:
    """In which order DDP lays the gradient of a parameter into a bucket: that of the parameter's memory.

    So it is for memory without gaps and overlaps, such as channels_last; others are laid as they are indexed.
    """
    strides, sizes = parameter.stride(), parameter.shape
    order = tuple(sorted(range(parameter.dim()), key=lambda each: (-strides[each], each)))
    wanted = 1
    for each in reversed(order):
        if sizes[each] > 1:
            if strides[each] != wanted:
                return tuple(range(parameter.dim()))
            wanted *= sizes[each]
    return order


def _laid(gradient: Tensor, order: Order) -> Tensor:
    """The numbers of a gradient as DDP lays them into a bucket: complex ones as pairs of real ones."""
    laid = gradient.permute(order)
    return (torch.view_as_real(laid) if laid.is_complex() else laid).reshape(-1)


def _own(drawn: Drawn, rank: int) -> Indices:
    return shares(drawn.whole.indices, range(drawn.shares.plan.n_ranks))[rank]


def _widened(gradient: Tensor) -> Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))
