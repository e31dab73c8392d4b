"""What a server's connections carry: only the time counts in which more waited for them."""

from __future__ import annotations

import pytest

from bml.faults.stalls import Flow
from bml.faults.throughput import LEAST_NBYTES, Meter, Sample

LINK = (1, 0)


def flow(nbytes: int, busy_s: float) -> Flow:
    return Flow(True, 0, 0, nbytes, busy_s)


def looks(*flows: Flow) -> list[Sample]:
    meter = Meter(window_s=1.0, now=0.0)
    for each in flows:
        meter.look({LINK: each})
    return meter.take(1.0)


def test_only_what_moves_between_two_looks_counts() -> None:
    assert looks(flow(10**9, 9.0)) == []
    assert looks(flow(10**9, 9.0), flow(10**9 + 50_000, 9.25)) == [Sample(1, 0, 50_000, 0.25)]


def test_too_few_bytes_say_nothing() -> None:
    assert looks(flow(0, 0.0), flow(LEAST_NBYTES - 1, 0.1)) == []
    assert looks(flow(0, 0.0), flow(LEAST_NBYTES, 0.125)) == [Sample(1, 0, LEAST_NBYTES, 0.125)]


def test_too_few_bytes_count_with_those_of_the_next_windows() -> None:
    meter = Meter(window_s=1.0, now=0.0)
    for n in range(7):
        meter.look({LINK: flow(1500 * n, 0.01 * n)})
        found = meter.take(float(n))
        assert found == ([Sample(1, 0, 9000, pytest.approx(0.06))] if n == 6 else [])


@pytest.mark.parametrize("nbytes", [0, 100, LEAST_NBYTES - 1])
def test_a_connection_that_was_busy_for_long_is_slow_however_little_it_carried(nbytes: int) -> None:
    meter = Meter(window_s=1.0, now=0.0)
    meter.look({LINK: flow(0, 0.0)})
    meter.look({LINK: flow(nbytes, 0.49)})
    assert meter.take(1.0) == []
    meter.look({LINK: flow(2 * nbytes, 1.49)})
    assert meter.take(2.0) == [Sample(1, 0, 2 * nbytes, 1.49)]
    assert meter.take(3.0) == []


def test_a_kernel_that_does_not_say_for_how_long_measures_nothing() -> None:
    assert looks(flow(0, 0.0), flow(10**9, 0.0)) == []


def test_a_new_connection_begins_anew() -> None:
    again = [flow(0, 0.0), flow(10**6, 0.1), flow(10, 0.01), flow(500_010, 0.11)]
    (sample,) = looks(*again)
    assert sample.nbytes == 1_500_000


def test_a_window_is_told_once() -> None:
    meter = Meter(window_s=1.0, now=0.0)
    for n in range(1, 26):
        meter.look({LINK: flow(n * 10**5, n * 0.1)})
        found = meter.take(n * 0.1)
        assert bool(found) == (n in (10, 20))
        if found:
            assert found[0].nbytes == (9 if n == 10 else 10) * 10**5


def test_a_view_begins_a_new_window() -> None:
    meter = Meter(window_s=0.05, now=0.0)
    meter.look({LINK: flow(0, 0.0)})
    meter.look({LINK: flow(10**6, 0.1)})
    meter.restart(0.2)
    assert meter.take(0.3) == []
    meter.look({LINK: flow(2 * 10**6, 0.2)})
    assert meter.take(0.4) == []


def test_windows_stay_on_their_grid_however_late_they_are_asked_for() -> None:
    """All servers' windows begin with a view; if each late end delayed the next, they would drift apart."""
    meter, ends = Meter(window_s=1.0, now=0.0), []
    for n in range(1, 14):
        at = n * 0.37
        meter.look({LINK: flow(n * 10**5, n * 0.1)})
        if meter.take(at):
            ends.append(round(at, 2))
    assert ends == [1.11, 2.22, 3.33, 4.07]
