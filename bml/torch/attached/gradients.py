"""From backward to the means: hooks on gradients fill the buckets, and full buckets begin their steps.

Every server begins the same steps in the same order, whatever the order in which its gradients come: a bucket
waits for those before it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bml.topology.errors import UsageError
from bml.torch.attached.bucket import Again, GradientBucket
from bml.torch.attached.layout import buckets, limit_of
from bml.torch.attached.memory import Named, reduced_dtype
from bml.torch.attached.statistics import Statistics
from bml.torch.overlap.overlap import Overlap
from bml.train.batch import Batch
from bml.train.session import Session

_Made = Callable[[int, int], None]


class Gradients:
    """The gradients of the trained parameters. Raises UsageError where one cannot be reduced as it should."""

    def __init__(
        self,
        session: Session,
        trained: Sequence[Named],
        statistics: Statistics,
        bucket_nbytes: int | None,
        allow_unused: bool,
    ):
        self.overlap: Overlap | None = None
        """What lets the sums of a batch go on in the next one, if they may."""
        self._statistics = statistics
        self._allow_unused = allow_unused
        self._known = {id(each.parameter) for each in trained}
        sizes = [(str(p.dtype), p.numel() * reduced_dtype(p.dtype).itemsize) for _, p in trained]
        self.buckets = [
            GradientBucket(session, [trained[number] for number in numbers], numbers)
            for numbers in buckets(sizes, bucket_nbytes or limit_of(sum(nbytes for _, nbytes in sizes)))
        ]
        made = weakref.WeakMethod(self._made)  # Python's collector sees no cycle through hooks of a tensor
        for number, bucket in enumerate(self.buckets):
            for place, (_, parameter) in enumerate(bucket.members):
                parameter.register_post_accumulate_grad_hook(partial(_tell, made, number, place))
        self._batch: Batch | None = None
        self._again: Again | None = None
        self._n_begun = 0
        self.is_reduced = False
        """Whether the gradients are the means of the open batch."""
        self.is_last_part = True
        """Whether the next backward pass is the last one of the batch."""

    def open(self, batch: Batch, again: Again | None) -> None:
        """Begin a batch, without gradients."""
        self._batch, self._again = batch, again
        self._n_begun, self.is_reduced, self.is_last_part = 0, False, True
        self._statistics.open(batch)
        for bucket in self.buckets:
            bucket.clear()
        if self.overlap is not None:
            self.overlap.open()

    def close(self) -> None:
        """End the batch: later backward passes are none of ours."""
        self._batch = self._again = None
        self.is_reduced = False

    def begin_all(self, optimizer: Any) -> None:
        """Begin the steps that backward has not begun, once all gradients of the batch are there."""
        batch = self._batch
        if batch is None:
            raise UsageError(
                "optimizer.step() outside of a loop over run.batches: its gradients would differ between "
                "servers; step in the loop only"
            )
        if not self.is_last_part:
            raise UsageError(
                f"the loop over the parts of {batch} (batch.micro) was left before its last part"
            )
        self._check_strangers(optimizer)
        for bucket in self.buckets:
            bucket.check()
            if not bucket.is_ready:
                bucket.complete(self._allow_unused or not len(batch.indices))
        self._begin_ready(batch)

    def norm(self) -> float:
        """The norm of the gradients that this server contributes."""
        return math.hypot(*(bucket.norm() for bucket in self.buckets))

    def finish(self) -> None:
        """Wait for all steps of the batch: the gradients are the means from here on."""
        for bucket in self.buckets:
            bucket.finish()
        self.finish_first()

    def finish_first(self) -> None:
        """End the batch without waiting for the means; all else is waited for."""
        if self.overlap is not None:
            self.overlap.finish()
        self._statistics.finish()
        self.is_reduced = True

    def _made(self, number: int, place: int) -> None:
        """Backward has added to the gradient of a parameter, in this place of a bucket."""
        batch = self._batch
        if batch is None:
            return
        if self.buckets[number].made(place, self.is_last_part):
            self._begin_ready(batch)

    def _begin_ready(self, batch: Batch) -> None:
        """Begin the steps of the buckets that are full, as far as all before them are."""
        overlap = self.overlap
        while self._n_begun < len(self.buckets) and self.buckets[self._n_begun].is_ready:
            if batch.committed:
                raise UsageError(
                    f"{batch} ended before all of its gradients were sent: call run.reduce() before other "
                    "calls of the session"
                )
            if self._n_begun == 0:
                self._begin_first(batch)
            terms = overlap.terms(self._n_begun) if overlap is not None else {}
            self.buckets[self._n_begun].begin(batch, self._again, terms)
            self._n_begun += 1

    def _begin_first(self, batch: Batch) -> None:
        """Begin what is waited for before the buckets."""
        has_loss, overlap = self._again is not None, self.overlap
        if overlap is not None:
            overlap.begin_sums(batch, has_loss)
        self._statistics.begin(batch, has_loss, overlap.first_terms if overlap is not None else {})

    def _check_strangers(self, optimizer: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and id(parameter) not in self._known:
                    raise UsageError(
                        f"parameter {place} of group {number} of the optimizer, of shape "
                        f"{tuple(parameter.shape)}, has a gradient and was frozen or absent when it was "
                        "attached: give attach every parameter that is trained later"
                    )


def _tell(made: Callable[[], _Made | None], number: int, place: int, _: torch.Tensor) -> None:
    """A hook of a parameter."""
    function = made()
    if function is not None:
        function(number, place)
