"""User code that holds the interpreter's lock for 50 ms at a time evicts nobody."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import jobs
import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(110)]
HOLD_US = 50_000
N_STEPS = 60


def between_steps(session: bml.Session, hold: Callable[[int], object]) -> None:
    """The training thread computes in a C library that keeps the lock."""
    for _ in session.steps(N_STEPS):
        hold(HOLD_US)
        assert session.allreduce(np.full(30_000, 1.0, np.float32))[0] == session.n_servers


def beside_the_steps(session: bml.Session, hold: Callable[[int], object]) -> None:
    """Another thread does so without a pause, and the training thread computes for long between two steps."""
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            hold(HOLD_US)

    loading = threading.Thread(target=load, daemon=True)
    for step in session.steps(N_STEPS // 5):
        if step == 2:
            loading.start()
        for _ in range(10):
            hold(HOLD_US)
        assert session.allreduce(np.full(3_000, 1.0, np.float32))[0] == session.n_servers
    over.set()


@pytest.mark.parametrize("holders", ["all", "one"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("program", [between_steps, beside_the_steps])
def test_a_held_lock_evicts_nobody(program: Any, transport: str, holders: str) -> None:
    def train(session: bml.Session) -> bool:
        holds = holders == "all" or session.server == 1
        program(session, ctypes.PyDLL(None).usleep if holds else lambda us: None)
        return holds

    result = jobs.launch(train, "bcube:2x2", transport=transport)
    assert [view["reason"] for view in result.report["views"]] == ["start"]
    assert [result.values[server] for server in range(4)] == [holders == "all" or s == 1 for s in range(4)]
