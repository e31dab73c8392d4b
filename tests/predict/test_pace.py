"""What is noted of steps, with a clock that the test turns."""

import pytest

from bml.predict.pace import LEARNED, SIZES_KEPT, VIEWS_KEPT, WHOLE_VIEWS, Pace, StepTimes, Usual


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(pace: Pace, clock: Clock, n: int, computes_s: float, wires_s: float, epoch: int = 1) -> None:
    for _ in range(n):
        clock.now += computes_s
        pace.begin()
        clock.now += wires_s
        pace.end(epoch, 9, 1024, waits=True)


def test_a_blocking_step_is_computation_and_wires() -> None:
    clock = Clock()
    pace = Pace(clock)
    steps(pace, clock, 10, 0.25, 0.5)
    pace.look()
    assert pace.views[1].usual(1024) == Usual(8, 0.75, 0.5, 0.0, 0.5, 0.0)
    assert pace.views[1].first is not None
    assert pace.views[1].first.n_steps == LEARNED


def test_a_step_that_a_view_interrupted_counts_for_no_view() -> None:
    clock = Clock()
    pace = Pace(clock)
    steps(pace, clock, 6, 0.0, 0.5)
    clock.now += 30.0
    steps(pace, clock, 6, 0.0, 1.0, epoch=2)
    pace.look()
    assert {epoch: each.step_s({1024: 1}) for epoch, each in pace.views.items()} == {1: 0.5, 2: 1.0}


@pytest.mark.parametrize(("computes_s", "slack_s", "exposed_s"), [(1.0, 0.375, 0.0), (0.25, 0.0, 0.375)])
def test_a_step_beside_computation_is_partly_hidden(
    computes_s: float, slack_s: float, exposed_s: float
) -> None:
    """The step takes 0.625 s, and begins at once."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(8):
        pace.begin()
        if computes_s < 0.625:
            clock.now += computes_s
            pace.wait_begins()
            clock.now += 0.625 - computes_s
            pace.end(1, 9, 8, waits=False)
        else:
            clock.now += 0.625
            pace.end(1, 9, 8, waits=False)
            clock.now += computes_s - 0.625
            pace.wait_begins()
        pace.wait_ends()
    pace.look()
    assert pace.views[1].usual(8) == Usual(6, max(computes_s, 0.625), 0.625, slack_s, exposed_s, 0.0)


def test_times_of_sizes_are_weighed_by_how_often_they_came() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in range(32):
        pace.begin()
        clock.now += 1.0 if step % 4 == 0 else 0.25
        pace.end(1, 4, 4096 if step % 4 == 0 else 64, waits=True)
    pace.look()
    view = pace.views[1]
    assert view.step_s({4096: 1, 64: 3}) == pytest.approx((1.0 + 3 * 0.25) / 4)
    assert not view.has([128])


def test_a_step_that_is_counted_has_its_times() -> None:
    """Another thread asks for the times of all sizes that are counted."""

    class Counts(dict[int, int]):
        def __setitem__(self, nbytes: int, count: int) -> None:
            super().__setitem__(nbytes, count)
            assert steps.usual(nbytes).step_s == 1.0

    steps = StepTimes(4, counts=Counts())
    for _ in range(3):
        steps.add(1000, 1.0, 1.0, 0.0, 0.0)
    assert steps.n_steps == 3


def test_of_views_that_come_and_go_little_stays() -> None:
    """Of old ones the medians alone, and in the end nothing."""
    clock = Clock()
    pace = Pace(clock)
    for epoch in range(1, VIEWS_KEPT + 100):
        for step in range(20):
            steps(pace, clock, 1, 0.25, 0.5 + step % 3, epoch)
        pace.look()
    assert [*pace.views] == list(range(100, VIEWS_KEPT + 100))
    kept = [sum(map(len, pace.views[epoch].times.values())) for epoch in sorted(pace.views)]
    assert kept == [1] * (VIEWS_KEPT - WHOLE_VIEWS) + [19] * WHOLE_VIEWS
    old, new = pace.views[100], pace.views[VIEWS_KEPT + 99]
    assert (old.n_steps, old.counts) == (new.n_steps, new.counts) == (19, {1024: 19})
    assert old.usual(1024)[:5] == new.usual(1024)[:5]
    assert old.step_s(old.counts) == new.step_s(new.counts)


def test_of_a_program_with_ever_new_sizes_the_newest_stay() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in range(5000):
        clock.now += 0.5
        pace.begin()
        clock.now += 0.25
        pace.end(1, 9, 1000 + step, waits=True)
        pace.look()
    taken = pace.views[1]
    assert taken.n_steps == 4998
    assert [*taken.counts] == [*taken.times] == list(range(6000 - SIZES_KEPT, 6000))
    assert taken.step_s(taken.counts) == 0.75
    assert not taken.has([1000])
