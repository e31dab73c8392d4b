"""When a connection counts as standing still, and when it only waits for a reader."""

from __future__ import annotations

import pytest

from bml.faults.stalls import Flow, Stalls

DETECT_S = 0.5
LINK = (7, 0)


def looks(stalls: Stalls, flows: dict[float, Flow]) -> list[float]:
    """Look at these times; returns those at which the connection stands still."""
    found = []
    for now, flow in sorted(flows.items()):
        stalls.look({LINK: flow}, now)
        found += [now] * (LINK in stalls.standing(now))
    return found


def test_unanswered_for_long_and_tried_twice_again() -> None:
    tries = {0.0: 0, 0.1: 0, 0.3: 1, 0.4: 1, 0.5: 1, 0.6: 1, 0.7: 2, 0.8: 2}
    stalls = Stalls(DETECT_S)
    assert looks(stalls, {now: Flow(True, 9, n) for now, n in tries.items()}) == [0.7, 0.8]
    assert stalls.standing(0.8) == {LINK: pytest.approx(0.8)}


def test_long_is_counted_from_the_last_answer() -> None:
    stalls = Stalls(DETECT_S)
    flows = {now / 10: Flow(True, now // 4, now % 4) for now in range(40)}  # one answer every 0.4 s
    assert looks(stalls, flows) == []


def test_nothing_outstanding_nothing_stalled() -> None:
    stalls = Stalls(DETECT_S)
    assert looks(stalls, {now / 10: Flow(False, 3, 0) for now in range(50)}) == []
    assert looks(stalls, {now / 10: Flow(True, 3, now - 50) for now in range(50, 58)}) == [5.5, 5.6, 5.7]


def test_a_reader_that_does_not_read_is_no_stall() -> None:
    """As recorded: Linux answers the second probe of a closed window late, as answers are rationed."""
    probes = {0.4: (8, 0), 0.8: (8, 1), 1.7: (8, 1), 1.8: (9, 0), 3.4: (9, 0), 3.5: (10, 0), 6.9: (10, 0)}
    flows = {now: Flow(True, answers, tries) for now, (answers, tries) in probes.items()}
    assert looks(Stalls(DETECT_S), flows) == []


def test_what_is_answered_late_again_and_again_is_no_stall() -> None:
    """A window that was taken back: the kernel sends the same again, and the answer moves nothing."""
    stalls = Stalls(DETECT_S)
    flows = {now / 10: Flow(True, now // 16, now // 16) for now in range(100)}
    assert looks(stalls, flows) == []


def test_a_connection_that_moves_again_stands_no_longer() -> None:
    stalls = Stalls(DETECT_S)
    assert looks(stalls, {0.0: Flow(True, 1, 0), 0.9: Flow(True, 1, 2)}) == [0.9]
    stalls.look({LINK: Flow(True, 2, 0)}, 1.0)
    assert stalls.standing(1.0) == {}


def test_a_connection_that_has_ended_is_forgotten() -> None:
    stalls = Stalls(DETECT_S)
    stalls.look({LINK: Flow(True, 1, 0)}, 0.0)
    stalls.look({}, 0.5)
    stalls.look({LINK: Flow(True, 1, 2)}, 0.9)
    assert stalls.standing(1.0) == {}
