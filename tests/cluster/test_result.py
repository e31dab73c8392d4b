"""What a job's result says of itself."""

from __future__ import annotations

from bml.cluster.launcher.result import Result
from bml.cluster.spec.job import JobSpec, ServerReport


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


def test_a_job_that_was_asked_to_end_has_not_failed() -> None:
    result = Result(JobSpec("bcube:2x2"), left=dict.fromkeys(range(4), "it got SIGTERM"))
    assert result.outcome()["interrupted"] is False
    result.interrupted = True
    outcome = result.outcome()
    assert (outcome["interrupted"], outcome["ended_well"]) == (True, False)
    assert outcome["text"] == "it was interrupted"
