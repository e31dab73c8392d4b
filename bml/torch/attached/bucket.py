"""Gradients of some parameters in one piece of the session's memory, reduced in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.torch.attached.memory import Named, reduced_dtype
from bml.torch.attached.sent import sent
from bml.torch.devices.vectors import vector_on
from bml.train.batch import Batch
from bml.train.batches import Indices
from bml.train.pending import Pending
from bml.train.session import Session

Again = Callable[[Indices], list[torch.Tensor]]
"""Computes the gradients of all parameters, summed over these samples."""
Terms = Mapping[str, Any]
"""How a part of a batch is begun: the keywords of `Batch.allreduce_async`."""


class GradientBucket:
    """The gradients of `members`, numbered `numbers` among all parameters; they have one dtype.

    Each is copied into the bucket as soon as it is made: in host memory it is in the cache then, and its
    memory serves the next ones, so backward needs no fresh pages. From an accelerator it is copied while
    backward goes on. Gradients of 16 bits are summed in float32.
    """

    def __init__(self, session: Session, members: Sequence[Named], numbers: Sequence[int]):
        self.members, self.numbers = members, numbers
        self.parameters = [each.parameter for each in members]
        first = self.parameters[0]
        self._dtype = reduced_dtype(first.dtype)
        shapes = [tuple(each.shape) for each in self.parameters]
        self._vector = vector_on(first.device, shapes, (self._dtype, first.dtype), session.empty)
        like = [torch.empty_like(each.detach(), device="meta") for each in self.parameters]
        self._strides = [each.stride() for each in like]
        """Those of gradients that autograd makes: fused optimizers rely on the layout of the parameters."""
        self._markers = [sent(each) for each in self.parameters]
        """What stands in the places of gradients that were made."""
        self._pending: Pending | None = None
        self._to_come: set[int] = set()

    def clear(self) -> None:
        """Begin a batch: no parameter has a gradient."""
        self._to_come = set(range(len(self.members)))
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def is_ready(self) -> bool:
        """Whether every gradient was made in the last backward pass of the batch."""
        return not self._to_come

    @property
    def is_over(self) -> bool:
        """Whether the step is over: `wait` returns at once, and nothing is computed again any more."""
        return self._pending is None or self._pending.done

    def made(self, place: int, is_last: bool) -> bool:
        """Note that backward has added to a gradient; returns whether that makes the bucket ready.

        Raises UsageError if the last one was made before.
        """
        if place not in self._to_come:
            raise UsageError(
                f"backward made another gradient of {self.members[place].name!r} after the last one of this "
                "batch: add the losses up and call backward() once, or take the share in parts (`for samples "
                "in batch.micro(n)`)"
            )
        if not is_last:
            return False
        self._take(place)
        return not self._to_come

    def complete(self, allow_unused: bool) -> None:
        """Make the bucket ready. Raises UsageError for a missing gradient, unless zeros may be sent."""
        for place in sorted(self._to_come):
            name, parameter = self.members[place]
            if parameter.grad is None and not allow_unused:
                raise UsageError(
                    f"the parameter {name!r} got no gradient in this batch: call backward() before "
                    "optimizer.step() (not in a closure); freeze it with requires_grad_(False) before attach "
                    "if it is not used, or give attach allow_unused=True to send zeros for it"
                )
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter.detach())
            self._take(place)

    def begin(self, batch: Batch, again: Again | None, terms: Terms) -> None:
        """Begin the step of a bucket that is ready. A server without samples sends zeros."""
        ready = self._vector.begin(as_zeros=not len(batch.indices))
        recompute = again and self._recompute(again)
        self._pending = batch.allreduce_async(self._vector.array, recompute, ready=ready, **terms)

    def check(self) -> None:
        """Raise UsageError if a gradient was taken away after it had been made."""
        for place, marker in enumerate(self._markers):
            name, parameter = self.members[place]
            if place not in self._to_come and parameter.grad is not marker:
                raise UsageError(
                    f"the gradient of {name!r} was replaced between backward and the step: call zero_grad() "
                    "before backward"
                )

    def norm(self) -> float:
        """The norm of what is contributed."""
        return self._vector.norm()

    def finish(self) -> None:
        """Wait for the step: the gradients of the parameters become the means over the global batch."""
        self.take(self.wait())

    def wait(self) -> Array:
        """Wait for the step, and return the mean."""
        assert self._pending is not None
        mean: Array = self._pending.wait()
        return mean

    def take(self, mean: Array) -> None:
        """Let the gradients of the parameters be the mean that the step has given."""
        self._pending = None
        means = zip(self.parameters, self._vector.take(mean), self._strides, strict=True)
        for parameter, part, strides in means:
            parameter.grad = _laid(part, strides)

    def _take(self, place: int) -> None:
        """Take a gradient that is whole from its parameter. Raises UsageError for a sparse one."""
        name, parameter = self.members[place]
        grad = parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of {name!r} is {grad.layout}: only dense gradients can be reduced; give the "
                "layer sparse=False"
            )
        self._to_come.discard(place)
        self._vector.put(place, grad)
        parameter.grad = self._markers[place]

    def _recompute(self, again: Again) -> Callable[[Indices], Array]:
        def recompute(indices: Indices) -> Array:
            found = again(indices)
            parts = [found[number].to(self._dtype).reshape(-1) for number in self.numbers]
            gathered: Array = torch.cat(parts).cpu().numpy()
            return gathered

        return recompute


def _laid(mean: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The mean in another layout of memory, copied if it has another one."""
    if mean.stride() == strides:
        return mean
    laid = torch.empty_strided(mean.shape, strides, dtype=mean.dtype, device=mean.device)
    return laid.copy_(mean)
