"""A server that leaves goes alone if no coordinator answers, and at once if its launcher is gone."""

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
