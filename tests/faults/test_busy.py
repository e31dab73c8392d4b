"""A server that is busy: its computation takes 1 / (1 - share) times as long, and nothing else does."""

from __future__ import annotations

import pytest

from bml.faults.busy import Slowdown
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
    end = time.slowdown.begin(0.5)
    time.compute(0.25)
    assert time.call() == pytest.approx(0.25)
    time.compute(0.5)
    end()
    time.compute(2.0)
    assert time.call() == pytest.approx(0.5)
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
    end = time.slowdown.begin(0.75)
    time.compute(1.0)
    assert time.call() == pytest.approx(1.0 + 3.0)
    end()
    time.compute(1.0)
    assert time.call() == pytest.approx(1.0)
