"""User code that holds the interpreter's lock evicts nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import time

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


def test_servers_that_all_hold_the_lock_outlive_one_that_dies_meanwhile() -> None:
    """Longer than any answer is awaited, and nobody is left that hears the stand-ins of the others."""

    def train(session: bml.Session) -> list[float]:
        hold, sums = ctypes.PyDLL(None).usleep, []
        for step in session.steps(N_STEPS):
            if step == 40 and session.server == 2:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 40:
                hold(4_000_000)
            sums.append(float(session.allreduce(np.ones(1000, np.float32))[0]))
        return sums

    result = jobs.launch(train, "bcube:2x2", transport="tcp", detect_s=0.5)
    assert result.values == dict.fromkeys((0, 1, 3), [4.0] * 40 + [3.0] * (N_STEPS - 40))
    assert [view["members"] for view in result.report["views"]] == [[0, 1, 2, 3], [0, 1, 3]]
