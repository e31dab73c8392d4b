"""Gradients that are being summed: whatever reads or changes one before the sum is there gets an error."""

from __future__ import annotations

from typing import Any

import torch

from bml.topology.errors import UsageError


class SentGradient(torch.Tensor):  # type: ignore[misc]
    """The gradient of a parameter between backward and the sum. Every use of it raises UsageError."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UsageError(
            "a gradient was used that is not summed over all servers yet: call run.reduce() before "
            "clip_grad_norm_, scaler.unscale_, scaler.step and all else that reads or changes gradients"
        )


def sent(grad: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that cannot be used."""
    return torch.Tensor._make_subclass(SentGradient, grad.detach())
