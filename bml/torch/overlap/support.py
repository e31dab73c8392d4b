"""What steps that are taken bucket by bucket can be had for. The rest is an error in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bml.topology.errors import UsageError

OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Those of torch.optim whose step of a parameter depends on that parameter, its state and its group alone."""


def check_optimizer(optimizer: Any) -> None:
    """Raise UsageError for an optimizer that cannot be stepped for some of its parameters at a time."""
    if type(optimizer) not in [getattr(torch.optim, name) for name in OPTIMIZERS]:
        raise UsageError(
            "overlap_forward steps the optimizer for some parameters at a time. That is known to be right of "
            f"{', '.join(OPTIMIZERS)} of torch.optim, and not of {type(optimizer).__name__}: leave "
            "overlap_forward out"
        )


def check_step(optimizer: Any, n_own_hooks: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UsageError for a step with a closure, and for an optimizer with hooks of others."""
    if len(args) > 1 or kwargs:
        raise UsageError("overlap_forward takes no closure: call optimizer.step() without arguments")
    if n_hooks(optimizer) != n_own_hooks:
        raise UsageError(
            "the optimizer has hooks of its own (register_step_pre_hook, register_step_post_hook), and with "
            "overlap_forward they would be called for every bucket: leave overlap_forward out, or call "
            "run.reduce() before optimizer.step()"
        )


def n_hooks(optimizer: Any) -> int:
    """The number of functions that are called before and after a step of this optimizer."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def check_modules(model: nn.Module) -> None:
    """Raise UsageError for modules whose use of a parameter cannot be noticed."""
    for name, module in model.named_modules():
        what = _unseen(module)
        if what:
            raise UsageError(
                f"overlap_forward cannot be used with {what} ({name or 'the model'}): it reads parameters "
                "where that cannot be noticed; leave overlap_forward out"
            )


def check_parameters(parameters: list[tuple[str, Any]]) -> None:
    """Raise UsageError for parameters that take part in functions of torch in a way of their own."""
    plain = (nn.Parameter.__torch_function__, torch.Tensor.__torch_function__.__func__)
    for name, parameter in parameters:
        own = type(parameter).__torch_function__
        if getattr(own, "__func__", own) not in plain:
            raise UsageError(
                f"the parameter {name!r} is a {type(parameter).__name__}, a class with a __torch_function__ "
                "of its own: leave overlap_forward out"
            )


def _unseen(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "a module of TorchScript"
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return f"{type(module).__name__}"
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return "a module of torch.compile"
    return ""
