"""User code that holds the interpreter's lock for 50 ms at a time evicts nobody."""

from __future__ import annotations

import ctypes

import jobs
import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(110)]
HOLD_US = 50_000
N_STEPS = 60


@pytest.mark.parametrize(
    ("transport", "holders"),
    [("shm", "one"), ("tcp", "one"), ("tcp", "all"), ("shm", "all")],
)
def test_a_held_lock_evicts_nobody(transport: str, holders: str) -> None:
    """The training thread computes in a C library that keeps the lock."""

    def train(session: bml.Session) -> bool:
        holds = holders == "all" or session.server == 1
        hold = ctypes.PyDLL(None).usleep
        for _ in session.steps(N_STEPS):
            if holds:
                hold(HOLD_US)
            assert session.allreduce(np.full(30_000, 1.0, np.float32))[0] == session.n_servers
        return holds

    result = jobs.launch(train, "bcube:2x2", transport=transport)
    assert [view["reason"] for view in result.report["views"]] == ["start"]
    assert [result.values[server] for server in range(4)] == [holders == "all" or s == 1 for s in range(4)]
