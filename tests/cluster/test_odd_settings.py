"""What a job cannot be launched with is refused at once, in words that say what to give."""

from __future__ import annotations

from typing import Any

import pytest

import bml
from bml.cluster.launcher.result import Result
from bml.cluster.spec.job import JobSpec
from bml.errors import BmlError, UsageError
from bml.faults import Fault


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"start_s": -1}, "start_s is -1: give the seconds"),
        ({"start_s": float("nan")}, "start_s is nan"),
        ({"start_s": float("inf")}, "start_s is inf"),
        ({"start_s": "60"}, "start_s is '60'"),
        ({"start_s": True}, "start_s is True"),
        ({"detect_s": "1"}, "detect_s is '1': give seconds"),
        ({"min_servers": 1.5}, "min_servers is 1.5: give a whole number"),
        ({"min_servers": 0}, "min_servers is 0"),
        ({"min_servers": "2"}, "min_servers is '2'"),
        ({"kept_mib": "many"}, "kept_mib is many"),
        ({"kept_mib": float("nan")}, "kept_mib is nan"),
        ({"fabric": 3}, "3 is not the text of a fabric"),
        ({"train": 5}, "5 cannot be called: give the training function"),
        ({"faults": Fault.parse("kill:7@step=2")}, "there is no server 7"),
    ],
)
def test_it_is_refused_before_anything_is_started(settings: dict[str, Any], says: str) -> None:
    given = {"train": print, "fabric": "bcube:2x1", "launcher": "processes", **settings}
    with pytest.raises(UsageError) as caught:
        bml.start(**given)
    assert says in str(caught.value)


def test_a_silence_of_the_environment_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_DETECT_S", "soon")
    with pytest.raises(UsageError, match="BML_DETECT_S is 'soon': give"):
        bml.start(print, "bcube:2x1", launcher="processes")


def test_a_job_that_was_ended_early_says_so() -> None:
    result = Result(JobSpec("bcube:2x1"))
    assert str(result.failure()) == "the job was ended before a server reached the end"
    assert isinstance(result.failure(), BmlError)
    with pytest.raises(UsageError, match="no server has a value"):
        print(result.value)
