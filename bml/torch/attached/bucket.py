"""Gradients of some parameters in one piece of the session's memory, reduced in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    They are copied into the bucket when all of them are there. Gradients of 16 bits are summed in float32.
    """

    def __init__(self, session: Session, members: Sequence[Named], numbers: Sequence[int]):
        self.members, self.numbers = members, numbers
        self._parameters = [each.parameter for each in members]
        self._dtype = reduced_dtype(self._parameters[0].dtype)
        self._sizes = [each.numel() for each in self._parameters]
        self._vector = session.empty(sum(self._sizes), str(self._dtype).removeprefix("torch."))
        self._flat = torch.from_numpy(self._vector)
        self._views = self._shaped(self._flat)
        self._sent: list[torch.Tensor] = []
        self._pending: Pending | None = None
        self._to_come: set[int] = set()

    def clear(self) -> None:
        """Begin a batch: no parameter has a gradient."""
        self._pending = None
        self._to_come = set(range(len(self.members)))
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def is_ready(self) -> bool:
        """Whether every gradient was made in the last backward pass of the batch."""
        return not self._to_come

    def made(self, place: int, is_last: bool) -> bool:
        """Note that backward has added to a gradient; returns whether that makes the bucket ready.

        Raises UsageError if the step has begun.
        """
        if self._pending is not None:
            raise UsageError(
                f"backward made another gradient of {self.members[place].name!r} after the last one of this "
                "batch: add the losses up and call backward() once, or take the share in parts (`for samples "
                "in batch.micro(n)`)"
            )
        if not is_last:
            return False
        self._to_come.discard(place)
        return not self._to_come

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
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter.detach())
        self._to_come.clear()

    def begin(self, batch: Batch, again: Again | None) -> None:
        """Begin the step. A server without samples sends zeros. Raises UsageError for sparse gradients."""
        grads = [parameter.grad for parameter in self._parameters]
        for (name, _), grad in zip(self.members, grads, strict=True):
            if grad.layout != torch.strided:
                raise UsageError(
                    f"the gradient of {name!r} is {grad.layout}: only dense gradients can be reduced; give "
                    "the layer sparse=False"
                )
        if len(batch.indices):
            with torch.no_grad():
                torch._foreach_copy_(self._views, grads)
        else:
            self._flat.zero_()
        if not self._sent or self._dtype != grads[0].dtype:
            self._sent = [sent(each) for each in (self._views if self._dtype == grads[0].dtype else grads)]
        for parameter, marker in zip(self._parameters, self._sent, strict=True):
            parameter.grad = marker
        self._pending = batch.allreduce_async(self._vector, again and self._recompute(again))

    def check(self) -> None:
        """Raise UsageError if a gradient was taken away after its step had begun."""
        for (name, parameter), marker in zip(self.members, self._sent, strict=True):
            if parameter.grad is not marker:
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
        mean = torch.from_numpy(self._pending.wait()).to(self._parameters[0].dtype)
        for parameter, part in zip(self._parameters, self._shaped(mean), strict=True):
            parameter.grad = part

    def _recompute(self, again: Again) -> Callable[[Indices], Array]:
        def recompute(indices: Indices) -> Array:
            found = again(indices)
            parts = [found[number].to(self._dtype).reshape(-1) for number in self.numbers]
            gathered: Array = torch.cat(parts).numpy()
            return gathered

        return recompute

    def _shaped(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of the parameters' shapes that lie in a flat one."""
        parts = flat.split(self._sizes)
        return [part.view(each.shape) for part, each in zip(parts, self._parameters, strict=True)]
