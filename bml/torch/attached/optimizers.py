"""The state of an optimizer before its first step: servers that join are given values in these tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bml.topology.errors import UsageError

_AT_FIRST = {"step": 0, "mu_product": 1, "exp_inf": 0}
"""What a step with zero gradients changes in the state of torch's optimizers, and its value before.
ASGD has `eta` besides, which is the learning rate then."""
_PARAMS = "params"
_MOMENTUM = "momentum_buffer"
_IS_FIRST = "bml_is_first"
"""In the state of a parameter: its first gradient is to come. Servers that join are given this, too."""


def prime(optimizer: Any) -> None:
    """Create the optimizer's state by a step with zero gradients that changes nothing.

    A parameter's state that is there, such as that of a checkpoint, is left as it is. SGD with dampening also
    needs `keep_first_gradients`. Raises UsageError if the optimizer cannot take such a step.
    """
    new = [
        (group, each)
        for group in optimizer.param_groups
        for each in group[_PARAMS]
        if each.requires_grad and _is_empty(optimizer.state.get(each))
    ]
    if not new:
        return
    try:
        _make(optimizer, new)
    except BaseException as error:  # what is half made would be taken for that of a checkpoint
        for _, parameter in new:
            optimizer.state.pop(parameter, None)
        if not isinstance(error, Exception):
            raise
        raise UsageError(
            f"the state of {type(optimizer).__name__} cannot be made: it takes no step with zero "
            f"gradients ({type(error).__name__}: {error}): use another optimizer"
        ) from error


def _make(optimizer: Any, new: Sequence[tuple[dict[str, Any], Any]]) -> None:
    """Make the state of these parameters, each with its group."""
    with _unchanged(optimizer, [parameter for _, parameter in new]):
        for group, parameter in new:
            parameter.grad = torch.zeros_like(parameter)
            if "weight_decay" in group:
                group["weight_decay"] = 0
        optimizer.step()
    for group, parameter in new:
        if parameter in optimizer.state:
            _reset(optimizer.state[parameter], {**_AT_FIRST, "eta": group.get("lr")})
            if group.get("dampening") and optimizer.state[parameter].get(_MOMENTUM) is not None:
                optimizer.state[parameter][_IS_FIRST] = True


def keep_first_gradients(optimizer: Any) -> None:
    """Let SGD take the first gradient of each parameter without dampening, as it does if it is not primed.

    The optimizer must be primed. Hooks that complete the gradients must be registered before.
    """
    kept: list[tuple[dict[str, Any], torch.Tensor]] = []

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for state, buffer in kept:  # the last step raised an error
            state[_MOMENTUM] = buffer
        kept.clear()
        for group in optimizer.param_groups:
            for parameter in group[_PARAMS]:
                state = optimizer.state.get(parameter, {})
                if state.get(_IS_FIRST):  # a closure may make the gradient later
                    kept.append((state, state[_MOMENTUM]))
                    state[_MOMENTUM] = None  # the optimizer makes another of the gradient

    def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for state, buffer in kept:
            if state[_MOMENTUM] is not None:  # there was a gradient
                buffer.copy_(state[_MOMENTUM])
                state[_IS_FIRST] = False
            state[_MOMENTUM] = buffer
        kept.clear()

    if any(_IS_FIRST in state for state in optimizer.state.values()):
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def _is_empty(state: dict[str, Any] | None) -> bool:
    return state is None or all(value is None for value in state.values())


@contextmanager
def _unchanged(optimizer: Any, changed: Sequence[Any]) -> Iterator[None]:
    """Take all gradients away; at the end put them, the values of the groups and of `changed` back."""
    groups = optimizer.param_groups
    grads = [(each, each.grad) for group in groups for each in group[_PARAMS]]
    parameters = [(each, each.detach().clone()) for each in changed]
    values = [
        {key: (value, _copied(value)) for key, value in group.items() if key != _PARAMS} for group in groups
    ]
    try:
        for parameter, _ in grads:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
        for parameter, grad in grads:
            parameter.grad = grad
        for group, kept in zip(groups, values, strict=True):
            _put_back(group, kept)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _put_back(group: dict[str, Any], kept: dict[str, tuple[Any, Any]]) -> None:
    """Give a group the values that it had; a tensor stays the same one."""
    for key in group.keys() - kept.keys() - {_PARAMS}:
        del group[key]
    for key, (before, value) in kept.items():
        if isinstance(before, torch.Tensor):
            with torch.no_grad():
                before.copy_(value)
        group[key] = before if isinstance(before, torch.Tensor) else value


def _reset(state: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
