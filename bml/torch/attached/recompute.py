"""Computes again what a lost server had not contributed, and changes nothing by it.

Gradients of the parameters, running statistics and random numbers are as before. Data sets and dropout draw
from a seed of the run, the batch and the samples, so the numbers are the same on whichever server computes
these samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from bml.topology.errors import UsageError
from bml.torch.attached.bucket import Again
from bml.torch.attached.layout import seed_of
from bml.torch.attached.memory import Named
from bml.torch.devices.chance import forked, seed_all
from bml.torch.overlap.before import Before
from bml.train.batches import Indices

Loss = Callable[[Any, Any], torch.Tensor]
"""`loss(model, samples)`: the loss of these samples, a scalar, as the training loop computes it."""
Fetch = Callable[[Indices], Any]
"""Returns the samples of these indices, collated."""

LEAST_COMPARED = 8
"""From so many samples on the norms of a sum and of a mean differ by more than `_FACTOR`."""
_FACTOR = 4.0


class Recompute:
    """The gradients of a user's loss; of every set of samples they are computed once for all buckets."""

    def __init__(self, model: Any, loss: Loss, trained: Sequence[Named], before: Before | None = None):
        self._model, self._loss, self._before = model, loss, before or Before(model)
        self._parameters = [each.parameter for each in trained]
        self._where = self._parameters[0].device

    def of_batch(self, seed: int, step: int, fetch: Fetch) -> Again:
        """Return the function for one batch. It raises UsageError if the loss is no scalar.

        It computes with the model as it was in that batch, also when the next one is under way.
        """
        cached: dict[bytes, list[torch.Tensor]] = {}

        def again(indices: Indices) -> list[torch.Tensor]:
            key = indices.tobytes()
            if key not in cached:
                cached.clear()
                cached[key] = self._gradients(seed_of(seed, step, indices), fetch, indices)
            return cached[key]

        return again

    def _gradients(self, seed: int, fetch: Fetch, indices: Indices) -> list[torch.Tensor]:
        with (
            self._before.restored(),
            torch.enable_grad(),
            forked(self._where),
            _unchanged(self._model, len(indices)),
        ):
            seed_all(seed, self._where)
            samples = fetch(indices)
            seed_all(seed, self._where)  # as in the loop, where workers may have drawn
            loss = self._loss(self._model, samples)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise UsageError(
                    f"loss(model, samples) must return one number as a tensor; it returned {_shown(loss)}"
                )
            if not loss.requires_grad:
                return [torch.zeros_like(parameter) for parameter in self._parameters]
            wanted = [number for number, each in enumerate(self._parameters) if each.requires_grad]
            grads = torch.autograd.grad(loss, [self._parameters[each] for each in wanted], allow_unused=True)
            found = dict(zip(wanted, grads, strict=True))  # others were frozen since
            return [
                torch.zeros_like(parameter) if found.get(number) is None else found[number].detach()
                for number, parameter in enumerate(self._parameters)
            ]


def are_alike(found: float, wanted: float) -> bool:
    """Whether norms of at least `LEAST_COMPARED` samples may be both of a sum, or both of a mean.

    A norm of zero says nothing: it is like all others.
    """
    return not found or not wanted or 1 / _FACTOR < found / wanted < _FACTOR


@contextmanager
def _unchanged(model: Any, n_samples: int) -> Iterator[None]:
    """Keep the buffers of a model. A single sample has no statistics of its own: it gets the running ones.

    The model computes with copies: a backward pass that is under way may need the buffers as they are, and
    autograd refuses them if they were written, even with the same values.
    """
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in kept}
    alone = [
        module
        for module in model.modules()
        if n_samples < 2 and isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]
    for module in alone:
        module.eval()
    for module, name, buffer in kept:
        module._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for module in alone:
            module.train()
        for module, name, buffer in kept:
            module._buffers[name] = buffer


def _shown(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
