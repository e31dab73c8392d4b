"""Which servers are started again, and how often."""

from __future__ import annotations

import pytest

from bml.cluster.launcher.restarts import MOST_STARTS, OUT, WITHIN_S, RestartPolicy, is_worth_it


@pytest.mark.parametrize(
    ("kind", "again"), [("Evicted", True), ("JoinFailed", True), ("NotJoined", False), ("Left", False)]
)
def test_which_ends_are_worth_another_start(kind: str, again: bool) -> None:
    assert kind in OUT
    assert is_worth_it(kind) is again


@pytest.mark.parametrize("kind", ["TrainingError", "UsageError", "StepMismatch", "NoneType"])
def test_the_job_does_not_go_on_without_who_ends_otherwise(kind: str) -> None:
    assert kind not in OUT
    assert not is_worth_it(kind)


def test_a_server_that_never_comes_in_is_started_three_times_a_minute() -> None:
    policy = RestartPolicy()
    assert [policy.refusal(4, float(now)) for now in range(MOST_STARTS)] == [""] * MOST_STARTS
    assert "3 times within 60 s and never became a member" in policy.refusal(4, WITHIN_S)
    assert policy.refusal(5, WITHIN_S) == "", "others have starts of their own"
    assert policy.refusal(4, WITHIN_S + 0.5) == "", "the first was more than a minute ago"
    assert policy.refusal(4, WITHIN_S + 0.6)


def test_a_server_that_came_in_may_be_lost_as_often_as_it_likes() -> None:
    policy = RestartPolicy()
    for now in range(20):
        assert policy.refusal(4, float(now)) == ""
        policy.came_in({0, 4})
