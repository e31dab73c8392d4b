"""Torch's random numbers on the host and on an accelerator, which are seeded and kept together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ONE_AT_A_TIME = threading.RLock()
"""PyTorch holds a lock of its own while it makes a Python object of the state of a generator. Garbage may be
collected then, and another thread run: if that one asked for the state, both would wait for ever."""
os.register_at_fork(
    before=_ONE_AT_A_TIME.acquire,
    after_in_parent=_ONE_AT_A_TIME.release,
    after_in_child=_ONE_AT_A_TIME.release,
)


def seed_host(number: int) -> None:
    """Seed the random numbers of the host."""
    with _ONE_AT_A_TIME:
        torch.default_generator.manual_seed(number)


def seed_all(number: int, where: Any) -> None:
    """Seed the random numbers of the host, and those of `where`, a torch.device, if it is an accelerator."""
    seed_host(number)
    if where.type != "cpu":
        accelerator: Any = torch.get_device_module(where)
        with accelerator.device(where):
            accelerator.manual_seed(number)


@contextmanager
def forked(where: Any) -> Iterator[None]:
    """Keep the random numbers of the host and of `where`: afterwards they go on as if nothing was drawn."""
    if where.type == "cpu":
        fork = torch.random.fork_rng(devices=[])
    else:
        fork = torch.random.fork_rng(devices=[where.index], device_type=where.type)
    with _ONE_AT_A_TIME:
        fork.__enter__()
    try:
        yield
    finally:
        with _ONE_AT_A_TIME:
            fork.__exit__(None, None, None)
