"""Gradients of some parameters in one piece of the session's memory, reduced in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.torch.attached.memory import Named, reduced_dtype
from bml.torch.attached.sent import sent
from bml.train.batch import Batch
from bml.train.batches import Indices
from bml.train.pending import Pending
from bml.train.session import Session

Again = Callable[[Indices], list[torch.Tensor]]
"""Computes the gradients of all parameters, summed over these samples."""


class GradientBucket:
    """The gradients of `members`, numbered `numbers` among all parameters; they have one dtype.

    A gradient lies in the bucket as soon as backward has made it. Gradients of 16 bits are summed in float32,
    so they are copied when the step begins.
    """

    def __init__(self, session: Session, members: Sequence[Named], numbers: Sequence[int]):
        self.members, self.numbers = members, numbers
        first = members[0].parameter.dtype
        self._dtype = reduced_dtype(first)
        self._is_copied = self._dtype != first
        shapes = [tuple(each.parameter.shape) for each in members]
        self._arrays = session.bucket(shapes, str(self._dtype).removeprefix("torch."))
        self._flat = torch.from_numpy(self._arrays.vector)
        stops = np.cumsum([0, *(each.parameter.numel() for each in members)]).tolist()
        self._views = [
            self._flat[start:stop].view(shape)
            for (start, stop), shape in zip(pairwise(stops), shapes, strict=True)
        ]
        self._pending: Pending | None = None
        self._to_come: set[int] = set()
        self._is_filled = [False] * len(members)
        self._sent: list[torch.Tensor] = []

    def clear(self) -> None:
        """Begin a batch: no parameter has a gradient."""
        self._pending, self._sent = None, []
        self._to_come = set(range(len(self.members)))
        self._is_filled = [False] * len(self.members)
        for _, parameter in self.members:
            parameter.grad = None

    @property
    def is_ready(self) -> bool:
        """Whether every gradient was made in the last backward pass of the batch."""
        return not self._to_come

    @property
    def has_begun(self) -> bool:
        """Whether the step of this bucket has begun."""
        return self._pending is not None

    def take(self, place: int, is_last: bool) -> None:
        """Take the gradient that backward has just added to a parameter.

        Raises UsageError if it is sparse, or if the step has begun.
        """
        name, parameter = self.members[place]
        grad = parameter.grad
        if self._pending is not None:
            raise UsageError(
                f"backward made another gradient of {name!r} after the last one of this batch: add the "
                "losses up and call backward() once, or take the share in parts (`for samples in "
                "batch.micro(n)`)"
            )
        if grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of {name!r} is {grad.layout}: only dense gradients can be reduced; give the "
                "layer sparse=False"
            )
        if not self._is_copied and grad is not self._views[place]:
            self._views[place].copy_(grad.detach())
            parameter.grad = self._views[place]
        self._is_filled[place] = True
        if is_last:
            self._to_come.discard(place)

    def complete(self, allow_unused: bool) -> None:
        """Make the bucket ready. Raises UsageError for a missing gradient, unless zeros may be sent."""
        for place in sorted(self._to_come):
            name, parameter = self.members[place]
            if not allow_unused:
                raise UsageError(
                    f"the parameter {name!r} got no gradient in this batch: call backward() before "
                    "optimizer.step() (not in a closure); freeze it with requires_grad_(False) before attach "
                    "if it is not used, or give attach allow_unused=True to send zeros for it"
                )
            if not self._is_filled[place]:
                self._views[place].zero_()
                parameter.grad = (
                    torch.zeros_like(parameter.detach()) if self._is_copied else self._views[place]
                )
        self._to_come.clear()

    def begin(self, batch: Batch, again: Again | None) -> None:
        """Begin the step. A server without samples sends zeros."""
        grads = [each.parameter.grad for each in self.members]
        if not len(batch.indices):
            self._flat.zero_()
        elif self._is_copied:
            for view, grad in zip(self._views, grads, strict=True):
                view.copy_(grad.detach())
        self._sent = [sent(grad) for grad in grads]
        for (_, parameter), grad in zip(self.members, self._sent, strict=True):
            parameter.grad = grad
        self._pending = batch.allreduce_async(self._arrays, again and self._recompute(again))

    def _recompute(self, again: Again) -> Callable[[Indices], list[Array]]:
        def recompute(indices: Indices) -> list[Array]:
            found = again(indices)
            return [found[number].to(self._dtype).numpy() for number in self.numbers]

        return recompute

    def check(self) -> None:
        """Raise UsageError if a gradient was taken away after its step had begun."""
        for (name, parameter), grad in zip(self.members, self._sent, strict=True):
            if parameter.grad is not grad:
                raise UsageError(
                    f"the gradient of {name!r} was replaced between backward and the step: call zero_grad() "
                    "before backward"
                )

    def norm(self) -> float:
        """The norm of what is contributed."""
        return float(torch.linalg.vector_norm(self._flat))

    def finish(self) -> None:
        """Wait for the step: the gradients of the parameters become the means over the global batch."""
        assert self._pending is not None
        means = self._pending.wait()
        for (_, parameter), mean in zip(self.members, means, strict=True):
            parameter.grad = torch.from_numpy(mean).to(parameter.dtype)
