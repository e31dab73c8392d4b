"""What a job's result says of itself."""

from __future__ import annotations

import pytest

from bml.cluster.launcher.result import Result
from bml.cluster.spec.job import JobSpec, ServerReport
from bml.cluster.spec.leaving import LEFT, NOT_JOINED
from bml.errors import BmlError


def test_a_result_is_shown_in_one_line() -> None:
    """Reports of nine servers, with the time of every commit, filled a screen or ten."""
    metrics = {"steps": 30, "commit_at_s": [0.5] * 31}
    reports = {
        server: ServerReport(server, "done", {"loss": 0.5}, "", "NoneType", "", "", None, [], metrics)
        for server in (0, 2, 3)
    }
    result = Result(JobSpec("bcube:2x2"), reports, {1: "its process is gone"})
    left = Result(
        JobSpec("bcube:2x2"), {0: reports[0]}, {1: "its process is gone"}, {2: "SIGTERM", 3: "SIGTERM"}
    )
    assert "1 of 4 servers done after 30 steps, lost 1, left 2, 3," in repr(left)
    assert left.outcome()["text"] == "1 servers reached the end after 30 steps; lost: 1; left: 2, 3"
    assert (left.report["dead"], left.report["left"]) == (left.dead, left.left)
    assert repr(result) == (
        "<Result on bcube:2x2: 3 of 4 servers done after 30 steps, lost 1, value {'loss': 0.5}>"
    )
    assert repr(Result(JobSpec("bcube:2x2"))) == "<Result on bcube:2x2: 0 of 4 servers done after 0 steps>"


def test_an_interrupt_hides_no_error_that_ended_the_job() -> None:
    """A server raised, another one was still about to end, and then came Ctrl-C."""
    said = "server 0 raised OSError: the disk is full"
    failed = ServerReport(0, "failed", None, said, "TrainingError", "", "", None, [], {"steps": 3})
    result = Result(JobSpec("bcube:2x2"), {0: failed}, interrupted=True)
    outcome = result.outcome()
    assert (outcome["interrupted"], outcome["kind"]) == (False, "TrainingError")
    assert "the disk is full" in outcome["text"]
    of_launcher = Result(JobSpec("bcube:2x2"), interrupted=True).outcome(BmlError("no process could be made"))
    assert of_launcher["text"] == "no process could be made"


@pytest.mark.parametrize(
    ("came", "why"),
    [
        (False, "it had not come when the job ended"),
        (True, "it did not end after the others, and was killed"),
    ],
)
def test_a_successor_that_comes_too_late_hides_not_why_its_server_was_lost(came: bool, why: str) -> None:
    result = Result(JobSpec("bcube:2x2"), {}, {1: "its process was killed by signal 9"})
    result.comes(1)
    result.give_up(1, came)
    result.give_up(2, came)
    assert result.dead == {1: f"its process was killed by signal 9; started again, {why}", 2: why}


def test_a_server_that_had_left_is_not_lost_because_it_cannot_be_started_again() -> None:
    result = Result(JobSpec("bcube:2x2"), {}, {1: "its process is gone"}, {3: "its Ray node is draining"})
    for server in (1, 3):
        result.comes(server)
        result.stays_away(server, "Ray did not start it in time")
    assert result.dead == {1: "its process is gone; not started again yet: Ray did not start it in time"}
    assert result.left == {3: "its Ray node is draining; not started again yet: Ray did not start it in time"}
    result.comes(3)
    result.stays_away(3, "no machine is there")
    assert result.left == {3: "its Ray node is draining; not started again yet: no machine is there"}
    result.comes(3)
    assert not result.left
    result.comes(1)
    result.stays_away(1, "no machine is there")
    assert result.dead == {1: "its process is gone; not started again yet: no machine is there"}
    result.dead[3] = "it was killed"
    result.comes(3)
    result.stays_away(3, "no machine is there")
    said = "it was killed; not started again yet: no machine is there"
    assert result.dead.pop(3) == said, "it had come since it left"
    result.lose(3, "it got SIGTERM", LEFT)
    result.comes(3)
    result.stays_away(3, "no machine is there")
    assert result.left == {3: "it got SIGTERM; not started again yet: no machine is there"}


def test_the_newest_death_is_the_one_that_is_said() -> None:
    result = Result(JobSpec("bcube:2x2"), {}, {1: "it got signal 9"})
    result.comes(1)  # and it does come
    result.dead[1] = "it got signal 11"
    result.comes(1)
    result.stays_away(1, "no machine is there")
    assert result.dead == {1: "it got signal 11; not started again yet: no machine is there"}


def test_a_server_that_was_never_there_was_not_lost_before() -> None:
    result = Result(JobSpec("bcube:2x2"))
    for _ in range(2):
        result.comes(2)
        result.stays_away(2, "no machine is there")
        assert result.dead == {2: "no machine is there"}
    result.comes(2)
    result.dead[2] = "it got signal 11"
    result.comes(2)
    result.give_up(2, came=False)
    assert result.dead == {2: "it got signal 11; started again, it had not come when the job ended"}


def test_a_server_that_had_left_is_not_lost_because_the_job_ends_first() -> None:
    result = Result(JobSpec("bcube:2x2"), left={3: "its Ray node is draining"})
    result.comes(3)
    result.give_up(3, came=False)
    assert not result.dead
    said = "its Ray node is draining; started again, it had not come when the job ended"
    assert result.left == {3: said}


@pytest.mark.parametrize("kind", NOT_JOINED)
def test_one_that_could_not_join_hides_not_why_it_was_started_again(kind: str) -> None:
    result = Result(JobSpec("bcube:2x2"), {}, {1: "it got signal 9"}, {3: "its Ray node is draining"})
    for server in (1, 3):
        result.comes(server)
        result.lose(server, "its files cannot be read", kind)
    assert result.dead == {1: "it got signal 9; not started again yet: its files cannot be read"}
    assert result.left == {3: "its Ray node is draining; not started again yet: its files cannot be read"}


def test_a_job_that_was_asked_to_end_has_not_failed() -> None:
    result = Result(JobSpec("bcube:2x2"), left=dict.fromkeys(range(4), "it got SIGTERM"))
    assert result.outcome()["interrupted"] is False
    result.interrupted = True
    outcome = result.outcome()
    assert (outcome["interrupted"], outcome["ended_well"]) == (True, False)
    assert outcome["text"] == "it was interrupted"
