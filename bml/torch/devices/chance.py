"""Torch's random numbers on the host and on an accelerator, which are seeded and kept together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_all(number: int, where: Any) -> None:
    """Seed the random numbers of the host, and those of `where`, a torch.device, if it is an accelerator."""
    torch.default_generator.manual_seed(number)
    if where.type != "cpu":
        accelerator: Any = torch.get_device_module(where)
        with accelerator.device(where):
            accelerator.manual_seed(number)


@contextmanager
def forked(where: Any) -> Iterator[None]:
    """Keep the random numbers of the host and of `where`: afterwards they go on as if nothing was drawn."""
    if where.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[where.index], device_type=where.type):
            yield
