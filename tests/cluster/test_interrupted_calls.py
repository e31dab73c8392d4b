"""Calls that the handler of a signal raises out of, on real servers: repeated, they give the same result."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import jobs
import numpy as np
import pytest

import bml
import bml.train.session as session_module
from bml.errors import UsageError
from bml.transport.shm import segment

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

TRANSPORTS = (
    "tcp",
    pytest.param("shm", marks=pytest.mark.skipif(bool(segment.why_not()), reason=segment.why_not() or "")),
)
LARGE, STEPS = 60_007, 150
LATEST_S = 0.003
"""Of the alarms of these tests, after the one before."""
FABRIC, ALL = "bcube:2x2", range(4)


class TimeIsUp(BaseException):
    """What the handlers of these tests raise."""


def in_call(frame: Any) -> bool:
    """Whether a collective call is under way: what is raised anywhere in it must not harm it."""
    while frame is not None:
        if frame.f_code.co_filename == session_module.__file__ and frame.f_code.co_name == "allreduce":
            return True
        frame = frame.f_back
    return False


class Alarms:
    """Raises out of calls at random moments, each time that it is `set`, and counts how often it did."""

    def __init__(self, seed: int):
        self.raised = 0
        self._chance = random.Random(seed)

    def set(self, handler: Callable[..., None] | None = None) -> None:
        signal.signal(signal.SIGALRM, handler or self.ring)
        self.wind()

    def wind(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-5, LATEST_S))

    def ring(self, number: int, frame: Any) -> None:
        if in_call(frame):
            self.raised += 1
            raise TimeIsUp
        self.wind()

    def repeat(self, call: Callable[[], Any]) -> Any:
        """What the call gives once it is through."""
        while True:
            try:
                return call()
            except TimeIsUp:
                self.wind()


def contribution(step: int, server: int) -> Any:
    n = LARGE if step % 4 == 0 else 5
    return np.arange(n, dtype=np.float64) * step + server


def total(step: int) -> Any:
    return np.sum([contribution(step, server) for server in ALL], axis=0)


def check(step: int, found: Any, right: Any) -> None:
    assert (found == right).all(), f"step {step}: {found}, not {right}"


def interrupted(session: bml.Session) -> int:
    """Sums, and means of batches, while alarms go off on server 0; returns how often they raised."""
    alarms = Alarms(seed=7)
    if session.server == 0:
        alarms.set()
    for step in range(1, STEPS):
        x = contribution(step, session.server)
        check(step, alarms.repeat(lambda x=x: session.allreduce(x)), total(step))
    n = len(ALL)
    for step, batch in enumerate(session.batches(n * STEPS, global_batch=n, epochs=1)):
        x = contribution(step, session.server)
        check(step, alarms.repeat(lambda batch=batch, x=x: batch.allreduce(x)), total(step) / n)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return alarms.raised


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_signals_interrupt_anywhere_gives_the_right_sum_when_it_is_repeated(
    transport: str,
) -> None:
    values = jobs.launch(interrupted, FABRIC, transport=transport).values
    assert set(values) == set(ALL)
    assert values[0] > 20, "hardly any alarm has struck"


def changes_handlers(session: bml.Session) -> int:
    """As `interrupted`; before every step there is another handler, as of a library that sets time limits."""
    alarms = Alarms(seed=8)
    for step in range(1, STEPS):
        x = contribution(step, session.server)
        if session.server == 0:
            alarms.set(lambda number, frame: alarms.ring(number, frame))
        check(step, alarms.repeat(lambda x=x: session.allreduce(x)), total(step))
        signal.setitimer(signal.ITIMER_REAL, 0)
    return alarms.raised


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handlers_that_are_installed_between_steps_tear_nothing(transport: str) -> None:
    values = jobs.launch(changes_handlers, FABRIC, transport=transport).values
    assert values[0] > 20, "hardly any alarm has struck"


def ends_late(session: bml.Session) -> tuple[list[float], int]:
    """On server 0 a signal is raised in every call when its result is made, but the user has none yet."""
    unflatten, armed, raised, found = session_module.unflatten, False, 0, []

    def late(*args: Any) -> Any:
        nonlocal armed
        made = unflatten(*args)
        if armed:
            armed = False
            signal.raise_signal(signal.SIGALRM)
        return made

    def ring(number: int, frame: Any) -> None:
        raise TimeIsUp

    def first(call: Callable[[], Any]) -> float:
        nonlocal armed, raised
        armed = session.server == 0
        try:
            return float(call()[0])
        except TimeIsUp:
            raised += 1
            return float(call()[0])

    signal.signal(signal.SIGALRM, ring)
    session_module.unflatten = late
    ones = np.full(3, 1.0 + session.server)
    found.append(first(lambda: session.allreduce(ones)))
    for step, batch in enumerate(session.batches(8, global_batch=4, epochs=1), 2):
        found.append(first(lambda batch=batch, step=step: batch.allreduce(step * ones)))
    session_module.unflatten = unflatten
    return found, raised


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_result_is_not_lost_between_its_step_and_the_user(transport: str) -> None:
    values = jobs.launch(ends_late, FABRIC, transport=transport).values
    assert values == {server: ([10.0, 5.0, 7.5], 3 if server == 0 else 0) for server in ALL}


def calls_another(session: bml.Session) -> list[float]:
    """Server 1 is interrupted in a sum, tries to go on without it, and repeats the sum then."""
    x = session.empty(5)
    x[:] = 1 + session.server
    seen = []
    for _ in session.steps(2):
        if session.server == 1:
            alarms = Alarms(seed=0)
            signal.signal(signal.SIGALRM, alarms.ring)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(TimeIsUp):
                session.allreduce(x)  # server 0 comes later
            with pytest.raises(UsageError, match="repeat that call before any other, this one"):
                session.allreduce(x, "max")
            with pytest.raises(UsageError, match="repeat that call before the training loop goes on"):
                next(session.steps(1))
        else:
            time.sleep(0.5)
        seen.append(float(session.allreduce(x)[0]))
        seen.append(float(session.allreduce(x, "max")[0]))
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupted_call_is_not_taken_for_another_one(transport: str) -> None:
    values = jobs.launch(calls_another, "bcube:2x1", transport=transport).values
    assert values == {server: [3.0, 2.0, 3.0, 2.0] for server in range(2)}
