"""Gradients that are being summed: whatever reads or changes one before the sum is there gets an error."""

from __future__ import annotations

from typing import Any

import torch

from bml.topology.errors import UsageError


class SentGradient(torch.Tensor):  # type: ignore[misc]
    """The gradient of a parameter between backward and the sum. It has no memory; its use is a UsageError."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UsageError(
            "a gradient was used that is not summed over all servers yet: call run.reduce() before "
            "clip_grad_norm_, scaler.unscale_, scaler.step and all else that reads or changes gradients"
        )

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Autograd adds another gradient to it, and says so in a hook, which raises an error.
        return args[0]


def sent(parameter: torch.Tensor) -> torch.Tensor:
    """Return what can be the gradient of this parameter, and cannot be used."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor._make_wrapper_subclass(
            SentGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
