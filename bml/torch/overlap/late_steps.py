"""Takes the step of the optimizer for one bucket after the other, each when one of its parameters is used.

`optimizer.step()` of the user only ends the batch. What comes back of its sums while the next forward pass
computes is waited for there, at the first use of a parameter of each bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn

from bml.topology.errors import UsageError
from bml.torch.overlap.apart import outside_of_the_pass
from bml.torch.overlap.before import Before
from bml.torch.overlap.guard import guard, release
from bml.torch.overlap.support import check_modules, check_step, n_hooks

_PARAMS = "params"
_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""In these PyTorch computes otherwise where a parameter has a class of its own."""


class Summed(Protocol):
    """Some parameters whose gradients are summed together."""

    @property
    def parameters(self) -> Sequence[Any]: ...  # noqa: D102

    @property
    def members(self) -> Sequence[Any]:
        """Each parameter, with its name."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether `wait` returns at once, and nothing of the bucket is computed again any more."""
        ...

    def wait(self) -> object:
        """Wait for the sums: `LateSteps.arrived` is called with the means, unless it was called before."""
        ...

    def take(self, mean: Any) -> None:
        """Let the gradients of the parameters be the means."""
        ...


class LateSteps:
    """The steps of one batch at most. With `keeps` old values are kept until it is whole.

    Until then the other parameters of the model, `untrained`, may not change.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, buckets: Sequence[Summed], before: Before, keeps: bool
    ):
        self._model, self._optimizer, self._buckets = model, optimizer, buckets
        self._before, self._keeps = before, keeps
        self._groups: list[dict[str, Any]] = []
        """The values of the parameter groups at the step: a scheduler changes them for the next one."""
        self._late: set[int] = set()
        self._thread = 0
        self.is_stepping = False
        """Whether a step of the optimizer is this module's, and not the user's."""
        known = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
        fast = [module for module in model.modules() if isinstance(module, _FAST)]
        known |= {id(parameter) for module in fast for parameter in module.parameters()}
        self._untrained = [
            each for each in model.parameters() if type(each) is nn.Parameter and id(each) not in known
        ]
        """Those of which a change is noticed when it is made; of others it is when it would do harm."""
        for state_hook in (
            optimizer.register_state_dict_pre_hook,
            optimizer.register_load_state_dict_pre_hook,
        ):
            state_hook(lambda *_: self.take_all())
        self._n_hooks = n_hooks(optimizer)

    def count_hooks(self) -> None:
        """All hooks that the optimizer has now may be called for every bucket."""
        self._n_hooks = n_hooks(self._optimizer)

    def defer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the step that the user calls do nothing, and take it later.

        All sums must have been begun. Raises UsageError where that would not be the same.
        """
        check_step(self._optimizer, self._n_hooks, args, kwargs)
        check_modules(self._model)
        self._groups = [
            {key: _kept(value) for key, value in group.items() if key != _PARAMS}
            for group in self._optimizer.param_groups
        ]
        if self._keeps:
            self._before.note()
            for parameter in self._untrained:
                guard(parameter, self.take_all, is_current=True)
        self._thread = get_ident()
        self._late = set(range(len(self._buckets)))
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.grad = None
                guard(parameter, partial(self.take, number))

    def take_all(self) -> None:
        """Take all steps that are late: every parameter has its new values from here on."""
        for number in sorted(self._late):
            self.take(number)

    def take_rest(self) -> None:
        """Take all steps that are late, in whatever thread backward runs hooks on gradients.

        The training thread waits for that one, so no two use parameters at once.
        """
        for number in sorted(self._late):
            if number in self._late:
                self._take(number)

    @property
    def are_late(self) -> bool:
        """Whether steps are to be taken yet."""
        return bool(self._late)

    def take(self, number: int) -> None:
        """Wait for the sums of a bucket, and take its step, if it is late. Raises the job's error."""
        if number not in self._late or self._before.is_restored:
            return
        if get_ident() != self._thread:
            raise UsageError(
                "another thread uses a parameter whose new values are not there yet: call run.synchronize() "
                "in the thread of the training loop before"
            )
        self._take(number)

    def _take(self, number: int) -> None:
        with _apart():
            self._buckets[number].wait()

    def arrived(self, number: int, mean: Any) -> None:
        """The means of a bucket are there: take its step, if it is late. No exception may leave this."""
        if number not in self._late:
            return
        bucket = self._buckets[number]
        with _apart():
            grads = [each.grad for each in bucket.parameters]
            bucket.take(mean)
            self._late.discard(number)
            for parameter in bucket.parameters:
                release(parameter)
            if self._keeps and not all(self._buckets[each].is_over for each in self._late):
                self._before.keep(bucket.parameters)
            self._step(bucket.parameters)
            for parameter, grad in zip(bucket.parameters, grads, strict=True):
                parameter.grad = grad
        if not self._late:
            self._before.forget()
            self._groups = []
            for parameter in self._untrained:
                release(parameter)

    def _step(self, parameters: Sequence[Any]) -> None:
        """Take the step of the optimizer for these parameters alone."""
        optimizer, wanted = self._optimizer, {id(each) for each in parameters}
        groups = optimizer.param_groups
        members = [[each for each in group[_PARAMS] if id(each) in wanted] for group in groups]
        optimizer.param_groups = [
            {**values, _PARAMS: chosen}
            for values, chosen in zip(self._groups, members, strict=False)  # groups may have been added
            if chosen
        ]
        self.is_stepping = True
        try:
            optimizer.step()
        finally:
            self.is_stepping = False
            optimizer.param_groups = groups


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def _apart() -> Iterator[None]:
    """Let what is computed not depend on the pass in which it happens: evaluation, or mixed precision."""
    with outside_of_the_pass(), torch.autocast("cpu", enabled=False):
        if torch.is_autocast_enabled("cuda"):
            with torch.autocast("cuda", enabled=False):
                yield
        else:
            yield
