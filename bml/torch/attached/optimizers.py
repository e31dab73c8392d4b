"""The state of an optimizer before its first step: servers that join are given values in these tensors."""

from __future__ import annotations

from typing import Any

import torch

from bml.topology.errors import UsageError

_AT_FIRST = {"step": 0, "mu_product": 1, "exp_inf": 0}
"""What a step with zero gradients changes in the state of torch's optimizers, and its value before.
ASGD has `eta` besides, which is the learning rate then."""


def prime(optimizer: Any) -> None:
    """Create the optimizer's state by a step with zero gradients that changes nothing.

    A state that is there, such as that of a checkpoint, is left as it is. Raises UsageError if the optimizer
    cannot take such a step.
    """
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if any(optimizer.state.get(each) for each in trained):
        return
    kept = [(each, each.detach().clone(), each.grad) for each in trained]
    decays = [(group, group["weight_decay"]) for group in optimizer.param_groups if "weight_decay" in group]
    try:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for group, _ in decays:
            group["weight_decay"] = 0
        optimizer.step()
    except Exception as error:
        raise UsageError(
            f"the state of {type(optimizer).__name__} cannot be made: it takes no step with zero gradients "
            f"({type(error).__name__}: {error}): use another optimizer"
        ) from error
    finally:
        for group, decay in decays:
            group["weight_decay"] = decay
        for parameter, value, grad in kept:
            with torch.no_grad():
                parameter.copy_(value)
            parameter.grad = grad
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                _reset(optimizer.state[parameter], {**_AT_FIRST, "eta": group.get("lr")})


def _reset(state: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(value)
        elif key in state:
            state[key] = value
