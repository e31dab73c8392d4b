"""The report of a job is the job's, also where none of its servers was there all the time."""

from __future__ import annotations

from typing import Any

import jobs
import numpy as np
import pytest
from rich.console import Console

import bml
from bml.cli.summary import summarise
from bml.cluster.launcher.result import Result
from bml.cluster.spec.job import JobSpec, ServerReport


def train(session: bml.Session) -> float:
    w = np.zeros(4)
    session.state(w=w)
    for _ in session.steps(300):
        w += session.allreduce(np.ones(4))
        jobs.pace(session, 3)  # a server is back before the next one dies
    return float(w[0])


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_job_in_which_every_server_was_replaced_counts_all_of_its_steps() -> None:
    faults = ["kill:0@step=50", "kill:1@step=120", "kill:2@step=190"]
    result = bml.launch(train, "bcube:3x1", launcher="processes", rejoin=True, faults=faults, prints=False)
    report = result.report
    assert report["steps"] == 300
    assert sum(size["steps"] for size in report["sizes"].values()) == 300
    added = sum(n_servers * size["steps"] for n_servers, size in report["sizes"].items())
    assert result.values == dict.fromkeys(range(3), float(added)), "each contribution is 1"
    assert all(size["steps_per_s"] for size in report["sizes"].values()), "somebody has timed each"
    assert [view["epoch"] for view in report["views"]] == list(range(1, len(report["views"]) + 1))
    assert [view["commit"] for view in report["views"] if "dead" in view["reason"]] == [50, 120, 190]
    assert report["never_struck"] == {}
    assert "after 300 steps" in repr(result)


def train_with_a_bad_gradient(session: bml.Session) -> None:
    w, loss = np.zeros(4), np.zeros(1)
    session.state(params={"w": w, "bias": np.zeros(2)}, loss=loss)
    for step in session.steps(5):
        w += session.allreduce(np.array([1.0, np.nan if (session.server, step) == (1, 3) else 1.0, 1.0, 1.0]))


@pytest.mark.real
@pytest.mark.timeout(120)
def test_parameters_that_are_no_numbers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"fabric": "bcube:2x1", "launcher": "processes", "prints": False}
    result = bml.launch(train_with_a_bad_gradient, **settings)
    assert result.report["nan"] == ["params.w"]
    summarise(result, Console(width=200))
    assert "params.w of the state ended with NaN in it\n" in capsys.readouterr().out


def seen(epoch: int, at_s: float) -> dict[str, Any]:
    """A view of which the launcher has heard."""
    return {"epoch": epoch, "at_s": at_s, "members": [0, 1, 2], "commit": 10 * epoch, "reason": "of launcher"}


def lived(epoch: int, at_s: float | None, reason: str) -> dict[str, Any]:
    """A view through which a server lived."""
    known = {"epoch": epoch, "at_s": at_s, "members": [0, 1, 2], "commit": 10 * epoch}
    return {**known, "reason": reason, "recover_s": 0.1}


def reported(server: int, outcome: str, views: list[dict[str, Any]]) -> ServerReport:
    return ServerReport(server, outcome, None, "", "", "", "", None, views, {"steps": 7})


def test_each_view_is_told_by_the_one_that_knows_most_of_it() -> None:
    reports = {
        0: reported(0, "done", [lived(4, None, "0"), lived(5, None, "0")]),
        1: reported(1, "done", [lived(5, None, "1")]),
        2: reported(2, "failed", [lived(2, 0.5, "2"), lived(3, 0.6, "2"), lived(4, 0.7, "2")]),
    }
    known = [seen(epoch, 100.0 + epoch) for epoch in (1, 2, 5)]
    views = Result(JobSpec("bcube:3x1"), reports=reports, seen=known).report["views"]
    assert [view["epoch"] for view in views] == [1, 2, 3, 4, 5]
    assert [view["reason"] for view in views] == ["of launcher", "2", "2", "0", "0"]
    assert [view["at_s"] for view in views] == [0.0, 0.5, 0.6, 0.7, 4.0]
    assert [view["recover_s"] for view in views] == [None, 0.1, 0.1, 0.1, 0.1]


def test_a_view_that_came_not_into_force_is_not_told() -> None:
    """The next coordinator had heard of it, and made another one in its place."""
    reports = {0: reported(0, "done", [lived(1, 0.0, "0"), lived(3, 0.2, "0")])}
    known = [seen(1, 100.0), seen(2, 100.1), seen(3, 100.2)]
    views = Result(JobSpec("bcube:3x1"), reports=reports, seen=known).report["views"]
    assert [view["epoch"] for view in views] == [1, 3]


def test_without_the_first_view_nobody_knows_when_the_others_came() -> None:
    views = Result(JobSpec("bcube:3x1"), seen=[seen(2, 100.0)]).report["views"]
    assert [view["at_s"] for view in views] == [None]
