"""Models of several buckets, whose steps are taken in the next forward pass; tests share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attached_programs import cross_entropy, sgd
from jobs_in_threads import N_CLASSES, N_FEATURES, initialised
from torch import nn

import bml.torch
from bml.torch.overlap.guard import Behind

SIZES: dict[str, Any] = {"bucket_mib": 1e-4}
"""Every tensor of more than 104 bytes is a bucket."""


def coupled() -> Any:
    return initialised(
        nn.Sequential(
            nn.Linear(N_FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, N_CLASSES)
        )
    )


class Backwards(nn.Module):
    """Its layers are registered in reverse order: the bucket that is needed first is summed first."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(8, N_CLASSES)
        self.middle = nn.Linear(8, 8)
        self.inner = nn.Linear(N_FEATURES, 8)

    def forward(self, x: Any) -> Any:
        return self.outer(torch.tanh(self.middle(torch.tanh(self.inner(x)))))


def backwards() -> Any:
    return initialised(Backwards())


def is_behind(model: Any) -> bool:
    return any(isinstance(each, Behind) for each in model.parameters())


def attached(session: Any, make_model: Callable[[], Any] = coupled, **settings: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and what `bml.torch.attach` makes of them. `overlap_forward` is on if unset."""
    model = make_model()
    optimizer = sgd(model)
    given = {"overlap_forward": True, **SIZES, **settings}
    return model, optimizer, bml.torch.attach(session, model, optimizer, None, cross_entropy, **given)
