"""The forecast of a job, from those of its servers, and its lines."""

from typing import Any

import pytest

from bml.cli.printed import future_lines
from bml.predict.foretold import foretold
from bml.predict.trouble import Warning


def predicted(steps: int) -> dict[str, Any]:
    basis = "the rate of the fabric"
    shown = {"epoch": 2, "step_s": 0.5, "wires_s": 0.4, "basis": basis, "measured_s": 0.52, "steps": steps}
    return {"predicted": shown, "remaining": {"done": 0.5, "seconds": 30.0, "low_s": 28.0, "high_s": 3700.0}}


def test_the_server_that_measured_most_speaks_and_each_trouble_is_said_once() -> None:
    first = Warning(3, 0, "resent", 1.0, "2% of the segments over it were sent again", {"share": 0.02})
    later, other = first.shown(5.0), Warning(4, None, "heat", 2.0, "it is hot", {}).shown(5.0)
    answers = {
        0: {**predicted(3), "warnings": [later]},
        1: {**predicted(9), "warnings": [first.shown(9.0), other]},
        2: {"predicted": None, "remaining": None, "warnings": []},
    }
    found = foretold(answers)
    assert found["predicted"]["steps"] == 9
    assert [(each["part"], each["for_s"]) for each in found["warnings"]] == [
        ("NIC 3/0", 8.0),
        ("server 4", 3.0),
    ]
    assert future_lines(found) == [
        "a step: predicted 500 ms, measured 520 ms (9 steps), from the rate of the fabric",
        "left: 30 s, between 28 s and 1:01:40 nine times in ten; 50% of the loop is done",
        "warning: NIC 3/0: 2% of the segments over it were sent again (for 8 s)",
        "warning: server 4: it is hot (for 3 s)",
    ]


def test_nothing_is_known_of_the_future_at_first() -> None:
    assert foretold({}) == {"predicted": None, "remaining": None, "warnings": []}
    assert future_lines(foretold({0: {"answers": False}})) == []


@pytest.mark.parametrize("seconds", [1e11, 1e18, 1e300, float("inf")])
def test_what_takes_longer_than_anybody_waits_is_said_in_words(seconds: float) -> None:
    rest = {"done": 0.0, "seconds": 3600.0, "low_s": 60.0, "high_s": seconds}
    (line,) = future_lines({"remaining": rest})
    assert line == "left: 1:00:00, between 0:01:00 and 100 years nine times in ten; 0% of the loop is done"
