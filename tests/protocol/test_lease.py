"""A server that needs a coordinator asks for it; one that leaves goes alone if none answers."""

from __future__ import annotations

from bml.protocol.server.lease import CoordinatorLease
from bml.protocol.timeouts import Timeouts

TIMES = Timeouts.of(0.5)
WAITS_S = TIMES.unanswered_s


def test_a_server_that_does_not_leave_waits_for_nothing() -> None:
    lease = CoordinatorLease(TIMES)
    lease.heard(0.0)
    lease.abandon()
    assert lease.leaves_alone(1e6) == ""


def test_it_leaves_alone_when_no_coordinator_answers() -> None:
    lease = CoordinatorLease(TIMES)
    lease.leaves(100.0)
    assert lease.leaves_alone(100.0 + WAITS_S) == ""
    assert lease.leaves_alone(100.1 + WAITS_S) == "no coordinator has answered for 10 s"


def test_a_coordinator_that_is_at_work_is_waited_for() -> None:
    lease = CoordinatorLease(TIMES)
    lease.leaves(0.0)
    for now in range(1, 100):
        assert lease.leaves_alone(float(now)) == ""
        lease.heard(float(now))
    assert lease.leaves_alone(99.1 + WAITS_S)


def test_without_a_launcher_nothing_is_waited_for() -> None:
    lease = CoordinatorLease(TIMES)
    lease.leaves(0.0)
    lease.abandon()
    assert "its launcher is gone" in lease.leaves_alone(0.0)


def test_a_view_that_none_can_bring_is_not_waited_for_long() -> None:
    for abandoned, waits_s in ((False, TIMES.orphan_s), (True, TIMES.longest_answer_s)):
        lease = CoordinatorLease(TIMES)
        if abandoned:
            lease.abandon()
        assert lease.lacks_view(True, False, 10.0) == ""
        assert lease.lacks_view(True, False, 10.0 + waits_s) == ""
        assert lease.lacks_view(True, False, 10.1 + waits_s) == f"{waits_s:g} s"
        lease.has_view()
        assert lease.lacks_view(True, False, 20.0 + waits_s) == ""
        assert lease.lacks_view(False, False, 1000.0) == ""
        assert lease.lacks_view(True, False, 2000.0) == ""


def test_a_server_that_has_ended_needs_a_coordinator_only_from_a_launcher() -> None:
    lease = CoordinatorLease(TIMES)
    assert lease.lacks_view(False, True, 0.0) == ""
    assert lease.lacks_view(False, True, 1e6) == ""
    lease.abandon()
    assert lease.lacks_view(False, True, 1e6) == ""
    assert lease.lacks_view(False, True, 1e6 + 3.0) == "2.25 s"


def asked_at(lease: CoordinatorLease, until_s: float, *, needs_view: bool, waits: bool) -> list[float]:
    """When it asks, if it looks every 0.1 s and hears nothing."""
    times = (tick / 10 for tick in range(int(until_s * 10) + 1))
    return [now for now in times if lease.asks(needs_view, waits, now)]


def test_a_server_that_needs_a_view_asks_every_detect_s() -> None:
    lease = CoordinatorLease(TIMES)
    assert asked_at(lease, 2.0, needs_view=True, waits=False) == [0.5, 1.0, 1.5, 2.0]
    assert lease.unanswered == 4
    assert not lease.in_vain, "it gives up after orphan_s, see lacks_view"
    lease.heard(2.1)
    assert lease.unanswered == 0


def test_one_that_waits_for_long_asks_now_and_then_and_gives_up() -> None:
    lease = CoordinatorLease(TIMES)
    assert asked_at(lease, 119.0, needs_view=False, waits=True) == [30.0, 60.0, 90.0]
    assert not lease.in_vain
    assert lease.asks(False, True, 120.0)
    assert lease.in_vain


def test_one_that_needs_nothing_asks_nothing() -> None:
    lease = CoordinatorLease(TIMES)
    assert lease.asks(True, False, 0.0) is False
    assert lease.asks(True, False, 0.5)
    assert not lease.asks(False, False, 0.6)
    assert lease.unanswered == 0
    assert asked_at(lease, 100.0, needs_view=False, waits=False) == []


def test_a_server_that_comes_to_need_a_view_asks_sooner() -> None:
    lease = CoordinatorLease(TIMES)
    assert not lease.asks(False, True, 0.0)
    assert not lease.asks(True, True, 10.0)
    assert lease.asks(True, True, 10.5)


def test_time_in_which_it_was_stopped_is_one_question() -> None:
    lease = CoordinatorLease(TIMES)
    assert not lease.asks(True, False, 0.0)
    assert lease.asks(True, False, 1000.0)
    assert not lease.asks(True, False, 1000.4)
    assert lease.unanswered == 1
