"""Calls that a signal's handler raises out of, on real servers: the session is broken, nothing is torn."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.errors import SessionBroken
from bml.sharedmem import segment

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

TRANSPORTS = (
    "tcp",
    pytest.param("shm", marks=pytest.mark.skipif(bool(segment.why_not()), reason=segment.why_not() or "")),
)
LARGE, STEPS = 60_007, 150
FABRIC, ALL = "bcube:2x2", range(4)


class TimeIsUp(BaseException):
    """What the handlers of these tests raise."""


def contribution(step: int, server: int) -> Any:
    n = LARGE if step % 4 == 0 else 5
    return np.arange(n, dtype=np.float64) * step + server


def total(step: int) -> Any:
    return np.sum([contribution(step, server) for server in ALL], axis=0)


def interrupted(seed: int, in_last: bool) -> Callable[[bml.Session], None]:
    """Sums that are checked, until an alarm raises on server 0, which catches it and calls again."""

    def train(session: bml.Session) -> None:
        chance = random.Random(seed)

        def ring(*_: Any) -> None:
            if session._collectives.calls._inside:
                raise TimeIsUp
            signal.setitimer(
                signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3)
            )  # between two calls nothing is torn

        if session.server == 0 and not in_last:
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.2))
        with pytest.raises(TimeIsUp):  # noqa: PT012
            for step in range(1, 100_000):
                if session.server == 0 and in_last and step == STEPS:
                    # Installed between two steps, as libraries that set time limits do.
                    signal.signal(signal.SIGALRM, ring)
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))
                found = session.allreduce(contribution(step, session.server))
                assert (found == total(step)).all(), f"step {step}: {found}"
        for call in (lambda: session.allreduce(np.ones(5)), lambda: next(session.steps(3)), session.barrier):
            with pytest.raises(SessionBroken):
                call()
        session.allreduce(np.ones(5))

    return train


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_a_handler_raises_out_of_breaks_the_session(transport: str, seed: int) -> None:
    with pytest.raises(SessionBroken, match="server 0 raised SessionBroken") as caught:
        jobs.launch(interrupted(seed, in_last=seed % 2 == 1), FABRIC, transport=transport)
    reports = caught.value.result.reports  # type: ignore[attr-defined]
    assert set(reports) == set(ALL)
    assert reports[0].outcome == "failed", {server: report.error for server, report in reports.items()}
    assert [reports[server].outcome for server in (1, 2, 3)] == ["stopped"] * 3


def counted(session: bml.Session) -> int:
    """Alarms whose handler only counts, in all steps: whatever they interrupt goes on."""
    alarms = 0

    def count(*_: Any) -> None:
        nonlocal alarms
        alarms += 1

    signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    for step in range(1, STEPS):
        found = session.allreduce(contribution(step, session.server))
        assert (found == total(step)).all(), f"step {step}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    return alarms


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handlers_that_raise_nothing_harm_nothing(transport: str) -> None:
    values = jobs.launch(counted, FABRIC, transport=transport).values
    assert set(values) == set(ALL)
    assert min(values.values()) > 20, "hardly any alarm has struck"
