"""A server that is busy: its computation takes 1 / (1 - share) times as long, and nothing else does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from bml.cluster.steps.handover import Handover
from bml.errors import SessionBroken
from bml.faults.busy import Slowdown
from bml.topology.errors import BmlError
from bml.train.calls import Calls


class Time:
    """A clock that computation and sleep turn."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []
        self.slowdown = Slowdown(lambda: self.now_s, self.sleep)
        self.calls = Calls(self.slowdown)

    def compute(self, seconds: float) -> float:
        self.now_s += seconds
        return seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def call(self, takes_s: float = 0.0) -> float:
        """One call of the session; returns how long it sleeps first."""
        before = sum(self.slept)
        with self.calls:
            self.now_s += takes_s
        return sum(self.slept) - before


@pytest.mark.parametrize(("share", "factor"), [(0.5, 2), (0.2, 1.25), (0.9, 10)])
def test_computation_takes_so_much_longer_and_calls_do_not(share: float, factor: float) -> None:
    time = Time()
    time.call()
    time.slowdown.begin(share)
    for computed_s in (0.3, 0.7):
        time.compute(computed_s)
        assert computed_s + time.call(takes_s=5.0) == pytest.approx(factor * computed_s)
    assert time.call() == 0, "nothing was computed"


def test_computation_before_the_fault_and_after_its_end_does_not_count() -> None:
    time = Time()
    time.compute(1.0)
    time.slowdown.begin(0.5, duration_s=1.5)
    time.compute(0.25)
    assert time.call() == pytest.approx(0.25)
    time.compute(2.5)
    assert time.call() == pytest.approx(0.5), "1 s is left of the fault, and half of it is lost"
    time.compute(2.0)
    assert time.call() == 0
    assert not time.slowdown.active, "what is over costs nothing"


def test_a_fault_that_begins_in_a_call_spares_the_call() -> None:
    time = Time()
    with time.calls:
        time.slowdown.begin(0.5)
        time.compute(3.0)
    time.compute(0.5)
    assert time.call() == pytest.approx(0.5)


def test_recompute_is_computation_too() -> None:
    time = Time()
    time.slowdown.begin(0.75)
    with time.calls:
        time.compute(4.0)
        assert time.calls.compute(lambda: time.compute(1.0)) == 1.0
        assert time.slept == [pytest.approx(3.0)]
        time.compute(4.0)
    assert time.call() == 0


def test_two_at_once_add_up() -> None:
    time = Time()
    time.slowdown.begin(0.5)
    time.slowdown.begin(0.75, duration_s=5.0)
    time.compute(1.0)
    assert time.call() == pytest.approx(1.0 + 3.0)
    assert time.call() == 0
    time.compute(1.0)
    assert time.call() == pytest.approx(1.0)
    time.compute(1.0)
    assert time.call() == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_fault_of_some_seconds_takes_no_more_than_its_share_of_them(share: float) -> None:
    chance = random.Random(7)
    for _ in range(50):
        time, duration_s = Time(), chance.uniform(0.1, 5.0)
        time.call()
        time.slowdown.begin(share, duration_s)
        work_s = sum(time.compute(chance.uniform(0.01, 2.0)) + 0 * time.call() for _ in range(20))
        lost_s = sum(time.slept)
        assert lost_s <= share * duration_s + 1e-9
        if work_s > duration_s:
            assert lost_s == pytest.approx(share * duration_s)


def test_a_broken_session_does_not_pause() -> None:
    time = Time()
    time.slowdown.begin(0.5)
    with pytest.raises(ValueError, match="wrong"), time.calls:
        raise ValueError("wrong")
    time.compute(3.0)
    with pytest.raises(SessionBroken):
        time.call()
    assert not time.slept


@pytest.mark.parametrize(
    "news", [lambda of: of.ask_to_leave("SIGTERM"), lambda of: of.fail(BmlError("over"))]
)
def test_a_server_that_is_to_end_pauses_no_longer(news: Callable[[Handover], None]) -> None:
    handover, now_s = Handover(joins=False), [0.0]
    slowdown = Slowdown(lambda: now_s[0], handover.no_pauses.wait)
    slowdown.begin(0.99)
    slowdown.resume()
    now_s[0] += 3600.0
    ends = threading.Timer(0.05, news, [handover])
    pauses = threading.Thread(target=slowdown.pause, daemon=True)
    pauses.start()
    ends.start()
    pauses.join(30.0)
    assert not pauses.is_alive()
