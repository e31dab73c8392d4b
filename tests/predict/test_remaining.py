"""The remaining time of simulated runs, of which the end is known."""

import sys
from random import Random

import pytest

from bml.predict.remaining import Remaining, Rest
from bml.train.position import Position

KINDS = ("steady", "a failure", "a failure that heals", "stragglers", "slow unnoticed", "a late failure")


def run(kind: str, seed: int) -> list[tuple[float, int]]:
    """(time of its end, epoch) of each of some hundred steps."""
    random = Random(f"{kind} {seed}")
    n, base_s = random.randrange(200, 800), random.uniform(0.05, 3)
    early, late = int(n * random.uniform(0.02, 0.2)), int(n * random.uniform(0.25, 0.95))
    heals, slower = int(n * random.uniform(0.2, 0.24)), random.uniform(1.2, 3)
    now, epoch, ends = 0.0, 1, list[tuple[float, int]]()
    for step in range(n):
        times = 1 + 0.05 * random.gauss(0, 1)
        if kind == "stragglers" and random.random() < 0.05:
            times *= random.uniform(2, 4)
        if step < 3:
            times += random.uniform(1, 5)
        changes = (kind.startswith("a failure") and step == early) or (
            kind == "a late failure" and step == late
        )
        changes = changes or (kind == "a failure that heals" and step == heals)
        if changes:
            epoch, times = epoch + 1, times + 0.6 / base_s
        damaged = epoch == 2
        if kind.startswith("a failure") and damaged:
            times *= 1.25
        if kind == "a late failure" and damaged:
            times *= 1.07
        if kind == "slow unnoticed" and step >= early:
            times *= slower
        now += max(0.01, times) * base_s
        ends.append((now, epoch))
    return ends


def said_at(ends: list[tuple[float, int]], shares: list[float]) -> list[tuple[Rest | None, float]]:
    """(what was said, what was left) when these shares were done."""
    remaining, found, total = Remaining(), list[tuple[Rest | None, float]](), ends[-1][0]
    remaining.note(0.0, 1, 0.0)
    asked = {int(len(ends) * share) for share in shares}
    for step, (now, epoch) in enumerate(ends, 1):
        remaining.note(step / len(ends), epoch, now)
        if step in asked:
            found.append((remaining.rest(now), total - now))
    return found


def test_nine_of_ten_runs_are_within_8_percent_from_a_quarter_on() -> None:
    good = 0
    runs = [(kind, seed) for kind in KINDS for seed in range(5)]
    for kind, seed in runs:
        said = said_at(run(kind, seed), [0.25, 0.35, 0.5, 0.65, 0.8])
        good += all(rest and abs(rest.seconds - left_s) <= 0.08 * left_s for rest, left_s in said)
    assert good >= 0.9 * len(runs)


def test_the_interval_has_the_end_in_it_nine_times_in_ten() -> None:
    inside = [
        rest is not None and rest.low_s <= left_s <= rest.high_s
        for kind in KINDS[:5]
        for seed in range(10)
        for rest, left_s in said_at(run(kind, seed), [0.3, 0.6, 0.9])
    ]
    assert sum(inside) >= 0.9 * len(inside)


def test_a_new_view_goes_as_it_is_predicted_until_it_was_measured() -> None:
    remaining = Remaining()
    for step in range(40):
        remaining.note(step / 100, 1, float(step))
    remaining.note(0.40, 2, 41.0)
    remaining.expect(2, 1.5)
    rest = remaining.rest(41.0)
    assert rest is not None
    assert rest.seconds == pytest.approx(60 * 1.5)
    assert rest.low_s < 60 * 1.5 < rest.high_s


def test_a_view_may_be_predicted_before_its_first_boundary() -> None:
    remaining = Remaining()
    for step in range(40):
        remaining.note(step / 100, 1, float(step))
    remaining.expect(2, 1.5)
    before = remaining.rest(39.0)
    assert before is not None
    assert before.seconds == pytest.approx(61.0), "view 1 is in force"
    remaining.note(0.40, 2, 41.0)
    remaining.expect(3, 2.0)  # view 2 is over before its rate is known
    remaining.note(0.41, 3, 44.0)
    rest = remaining.rest(44.0)
    assert rest is not None
    assert rest.seconds == pytest.approx(59 * 1.5 * 2.0)
    remaining.note(0.42, 4, 48.0)
    rest = remaining.rest(48.0)
    assert rest is not None
    assert rest.seconds == pytest.approx(58 * 1.5 * 2.0), "of view 4 nothing is predicted: as the one before"


def test_time_that_passes_after_a_boundary_is_taken_off() -> None:
    remaining = Remaining()
    for step in range(40):
        remaining.note(step / 100, 1, float(step))
    first, later = remaining.rest(39.0), remaining.rest(39.5)
    assert first is not None
    assert later is not None
    assert first.seconds - later.seconds == pytest.approx(0.5)


def test_nothing_is_said_before_enough_is_known() -> None:
    remaining = Remaining()
    assert remaining.rest(0.0) is None
    for step in range(4):
        remaining.note(step / 100, 1, float(step))
    assert remaining.rest(3.0) is None


def test_training_and_validation_after_one_another_are_one_run() -> None:
    """Ten epochs of 100 steps and then 10, of a second each: what is left is known in both."""
    position, remaining, now = Position(), Remaining(), 0.0
    outer = position.enter("steps(10)", 10, lambda: None)
    for epoch in range(10):
        position.advance(outer, epoch)
        for n_steps in (100, 10):
            inner = position.enter(f"steps({n_steps})", n_steps, lambda: None)
            for step in range(n_steps):
                position.advance(inner, step)
                remaining.note(position.done, 1, now)
                rest = remaining.rest(now)
                if epoch > 2:
                    assert rest is not None
                    assert rest.seconds == pytest.approx(1100 - now, rel=0.01, abs=1)
                    assert rest.low_s <= 1100 - now <= rest.high_s
                now += 1.0
            position.leave(inner)


def test_another_loop_begins_anew() -> None:
    remaining = Remaining()
    for step in range(50):
        remaining.note(step / 50, 1, float(step))
    remaining.note(0.0, 1, 60.0)
    assert remaining.rest(61.0) is None


@pytest.mark.parametrize("length", [sys.maxsize, 10**307, 10**400], ids=["maxsize", "e307", "e400"])
def test_nothing_is_said_of_a_loop_without_an_end(length: int) -> None:
    position, remaining = Position(), Remaining()
    loop = position.enter(f"steps({length})", length, lambda: None)
    for epoch in (1, 2):
        for step in range(12):
            position.advance(loop, step + 12 * epoch)
            remaining.note(position.done, epoch, 0.1 * loop.index)
    assert remaining.rest(4.0) is None
