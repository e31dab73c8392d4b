"""When a thread that yields its core decides that the core is contended."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from time import perf_counter

import pytest

from bml.io import spin
from bml.io.spin import CoreContention, yield_core

MS = 1e-3


def moves(contention: CoreContention, pattern: Iterator[tuple[float, float]], until_s: float) -> list[float]:
    """When it moves if it works and gives its core away so long in turn; `pattern` is of pairs of seconds."""
    now_s, found = 1.0, []
    for worked_s, given_s in pattern:
        now_s += worked_s
        if contention.yielded(now_s, now_s + given_s):
            found.append(now_s + given_s - 1.0)
        now_s += given_s
        if now_s - 1.0 > until_s:
            break
    return found


def always(worked_s: float, given_s: float) -> Iterator[tuple[float, float]]:
    while True:
        yield worked_s, given_s


def test_two_on_one_core_of_two_part_within_half_a_millisecond() -> None:
    found = moves(CoreContention(0, 2, 2, 1), always(0.05 * MS, 0.05 * MS), until_s=0.5 * MS)
    assert len(found) == 1


def test_if_moving_does_not_help_it_is_tried_ever_less_often() -> None:
    found = moves(CoreContention(0, 2, 2, 1), always(0.05 * MS, 0.05 * MS), until_s=1.0)
    gaps = [after - before for before, after in pairwise(found)]
    assert gaps == pytest.approx(sorted(gaps))
    assert len(found) < 80
    assert gaps[-1] == pytest.approx(16 * MS, rel=0.01)


def test_after_a_while_alone_it_is_quick_again() -> None:
    contention = CoreContention(0, 2, 2, 1)
    assert len(moves(contention, always(0.05 * MS, 0.05 * MS), until_s=50 * MS)) > 3
    assert not contention.yielded(10.0, 10.0 + 0.05 * MS)
    assert any(contention.yielded(10 + n * 0.1 * MS, 10 + (n + 0.5) * 0.1 * MS) for n in range(1, 5))


def test_the_others_take_longer_to_decide() -> None:
    first, second = (
        moves(CoreContention(rank, 2, 2, 1), always(0.05 * MS, 0.05 * MS), until_s=1 * MS)[0]
        for rank in (0, 1)
    )
    assert second - first > 0.15 * MS


def test_something_else_that_runs_for_a_moment_is_no_contention() -> None:
    contention = CoreContention(0, 2, 2, 1)
    assert not contention.yielded(1.0, 1.003)
    assert not contention.yielded(2.0, 2.003)


def test_a_fair_share_is_enough() -> None:
    """Four servers on two cores get a half each; of one core they would get a quarter."""
    assert not moves(CoreContention(0, 4, 2, 2), always(0.05 * MS, 0.05 * MS), until_s=1.0)
    assert moves(CoreContention(0, 4, 2, 2), always(0.05 * MS, 0.15 * MS), until_s=1 * MS)


@pytest.mark.parametrize(("n_threads", "n_cores", "most"), [(2, 1, 2), (3, 2, 1), (9, 2, 2)])
def test_too_many_for_the_cores_stay_where_they_are(n_threads: int, n_cores: int, most: int) -> None:
    assert not CoreContention(0, n_threads, n_cores, most).may_move


def test_a_thread_that_shared_its_core_just_now_does_not_sleep() -> None:
    contention = CoreContention(0, 2, 2, 1)
    contention.wait_begins()
    now_s = perf_counter()
    assert not contention.stays_awake(now_s)
    contention.yielded(now_s, now_s + 0.05 * MS)
    assert contention.stays_awake(now_s + 0.5 * MS)
    assert not contention.stays_awake(now_s + 0.6 * MS)


def test_a_long_wait_ends_in_sleep_however_many_share_the_core() -> None:
    contention = CoreContention(0, 2, 2, 1)
    for _ in range(2):
        contention.wait_begins()
        now_s, n_yields = perf_counter(), 0
        while contention.yielded(now_s, now_s + 0.1 * MS) or contention.stays_awake(now_s + 0.1 * MS):
            now_s, n_yields = now_s + 0.1 * MS, n_yields + 1
        assert 100 < n_yields < 300


def test_a_thread_that_moves_may_use_the_same_cores_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class AlwaysContended(CoreContention):
        def yielded(self, from_s: float, to_s: float) -> bool:
            return True

    monkeypatch.setattr(spin, "_LONG_YIELD_S", 0.0)
    seen: list[set[int]] = []

    def give() -> None:
        for allowed in (os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}):
            os.sched_setaffinity(0, allowed)
            yield_core(AlwaysContended(0, 2, 2, 1))
            seen.extend((allowed, os.sched_getaffinity(0)))

    thread = threading.Thread(target=give)  # its cores are its own
    thread.start()
    thread.join()
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
