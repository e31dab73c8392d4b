"""Whatever moment a signal's handler raises at, no lock stays held, and a job ends."""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.io.interruptible import Aside, Condition, Event

DEADLINE_S = 30.0
INTERRUPTS = 1000
AGAIN_S = 1.0


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Sets an alarm, whose handler raises KeyboardInterrupt; 0 cancels it.

    It rings again, as Python drops what is raised in a finalizer, which is no fault of ours. The time limit
    of the test uses the same timer: it has afterwards what was left of it.
    """
    dropped = sys.unraisablehook

    def passed_on(what: Any) -> None:
        if what.exc_type is not KeyboardInterrupt:
            dropped(what)

    monkeypatch.setattr(sys, "unraisablehook", passed_on)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    yield lambda after_s: (signal.setitimer(signal.ITIMER_REAL, after_s, AGAIN_S), None)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, left_s)


def interrupted(alarm: Callable[[float], None], after_s: float, function: Callable[[], object]) -> bool:
    """Call `function` again and again until the alarm rings; returns whether it rang there."""
    rang = False
    try:
        alarm(after_s)
        while True:
            function()
    except KeyboardInterrupt:
        rang = True
    alarm(0)
    return rang


def enters(condition: Condition) -> None:
    with condition:
        pass


def waits(condition: Condition) -> None:
    with condition:
        condition.wait(0)


def notifies(condition: Condition) -> None:
    with condition:
        condition.notify_all()


@pytest.mark.parametrize("use", [enters, waits, notifies])
def test_no_interrupt_leaves_a_condition_held(
    use: Callable[[Condition], None], alarm: Callable[[float], None]
) -> None:
    chance, condition = random.Random(1), Condition()
    for _ in range(INTERRUPTS):
        assert interrupted(alarm, chance.uniform(1e-5, 2e-4), lambda: use(condition))
        assert not condition._is_owned()
    taken = Aside(lambda: enters(condition), "takes it")
    assert taken.result() is None


@pytest.mark.slow
def test_an_event_whose_wait_was_interrupted_can_be_set(alarm: Callable[[float], None]) -> None:
    chance = random.Random(2)
    for _ in range(INTERRUPTS):
        event = Event()
        assert interrupted(alarm, chance.uniform(1e-5, 2e-4), lambda event=event: event.wait(0))  # type: ignore[misc]
        Aside(event.set, "sets it").result()
        assert event.is_set()
        assert event.wait(0)


def test_a_condition_wakes_all_that_wait_once_it_is_true() -> None:
    condition, there = Condition(), []

    def waits_for_three() -> bool:
        with condition:
            there.append(0)
            condition.notify_all()
            return condition.wait_for(lambda: len(there) == 3, DEADLINE_S)

    asides = [Aside(waits_for_three, f"waits-{number}").start() for number in range(3)]
    assert [each.result() for each in asides] == [True, True, True]
    with condition:
        assert not condition.wait_for(lambda: len(there) == 4, 0.01)
        assert not condition.wait(0.01)
    with pytest.raises(RuntimeError, match="not entered"):
        condition.wait(0)
    assert not condition._is_owned()


def test_an_interrupted_notice_wakes_all_with_the_next_one(alarm: Callable[[float], None]) -> None:
    chance = random.Random(4)
    for _ in range(100):
        condition, woken = Condition(), []

        def waits_to_be_woken(condition: Condition = condition, woken: list[bool] = woken) -> bool:
            with condition:
                woken.append(condition.wait(DEADLINE_S))
                return woken[-1]

        asides = [Aside(waits_to_be_woken, f"waits-{number}").start() for number in range(3)]
        while len(condition._wakers) < 3:
            time.sleep(0)
        interrupted(alarm, chance.uniform(2e-6, 2e-5), lambda condition=condition: notifies(condition))  # type: ignore[misc]
        notifies(condition)
        assert [each.result() for each in asides] == [True] * 3


def test_an_event_that_is_cleared_is_waited_for_again() -> None:
    event = Event()
    assert not event.wait(0.01)
    event.set()
    assert event.wait()
    event.clear()
    assert not event.wait(0)


def test_an_interrupt_ends_the_wait_for_a_call_and_not_the_call(alarm: Callable[[float], None]) -> None:
    goes_on = threading.Event()
    call = Aside(lambda: goes_on.wait(DEADLINE_S) and "value", "waits").start()
    assert interrupted(alarm, 0.01, call.result)
    assert not call.is_over
    goes_on.set()
    assert call.result() == "value"
    with pytest.raises(ZeroDivisionError):
        Aside(lambda: 1 / 0, "fails").result()


# --- jobs --------------------------------------------------------------------------------------------


def endless(session: bml.Session) -> None:
    w = np.zeros(10)
    session.state(params=w)
    for _ in session.steps(10**9):
        w += session.allreduce(np.ones(10))
        time.sleep(0.001)


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_job_whose_questions_were_interrupted_answers_and_ends(alarm: Callable[[float], None]) -> None:
    """As Ctrl-C of a notebook that looks at its job."""
    chance, children = random.Random(3), jobs.children()
    with bml.start(endless, "bcube:2x2", launcher="processes", transport="tcp") as job:
        for _ in range(300):
            assert interrupted(alarm, chance.uniform(1e-5, 5e-3), job.status)
        asked = Aside(job.status, "asks").result()
        assert asked["running"]
        assert sorted(server for server, said in asked["servers"].items() if "step" in said) == [0, 1, 2, 3]
    assert not job.running
    assert jobs.children() == children


class InterruptsWhereItsLockIsGivenBack(logging.Handler):
    """A second Ctrl-C comes at the worst moment: the line is out, and the handler is about to be free."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupts = False

    def emit(self, record: logging.LogRecord) -> None:
        self.interrupts = "interrupt again" in record.getMessage()

    def release(self) -> None:
        if self.interrupts:
            self.interrupts = False
            signal.raise_signal(signal.SIGINT)
        super().release()


def stuck(session: bml.Session) -> None:
    session.state(params=np.zeros(10))
    for step in session.steps(10**9):
        session.allreduce(np.ones(10))
        if step == 3:
            time.sleep(1000)


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_second_interrupt_just_after_the_news_of_the_first_ends_the_job(tmp_path: Any) -> None:
    log, handler, children = logging.getLogger("bml"), InterruptsWhereItsLockIsGivenBack(), jobs.children()
    log.addHandler(handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            bml.start(
                stuck, "bcube:2x2", launcher="processes", transport="tcp", checkpoint=tmp_path / "kept"
            ),
        ):
            raise KeyboardInterrupt
        Aside(lambda: log.warning("another thread can write its line"), "logs").result()
    finally:
        log.removeHandler(handler)
    assert jobs.children() == children
