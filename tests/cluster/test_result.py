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
    assert repr(result) == (
        "<Result on bcube:2x2: 3 of 4 servers done after 30 steps, lost 1, value {'loss': 0.5}>"
    )
    assert repr(Result(JobSpec("bcube:2x2"))) == "<Result on bcube:2x2: 0 of 4 servers done after 0 steps>"
