"""The scripts of the page on a document that is played: what a person reads."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_page_model import ENDED, page
from test_static import STATIC

from bml.web import model
from bml.web.served import _fabric

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node is not installed (Debian: nodejs)")
PLAYER = Path(__file__).with_name("page_in_node.js")


def played(*steps: dict[str, Any]) -> list[Any]:
    """Give the page the fabric bcube:3x2 and these steps; returns what was asked for."""
    assert NODE is not None
    begin = [{"open": True}, {"event": "fabric", "data": json.loads(_fabric("bcube:3x2"))}]
    given = json.dumps([*begin, *steps])
    ran = subprocess.run([NODE, PLAYER, STATIC], input=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout))


def shown(now_s: float = 1.8e9, **other: Any) -> dict[str, Any]:
    """The event of a page, made from its status at this time."""
    return {"event": "page", "data": {**model.as_json(page(**other)), "now_s": now_s}}


def last(**other: Any) -> dict[str, Any]:
    """The event of the last page of a job that has ended well."""
    step = shown(**ENDED, **other)
    outcome = {"ended_well": True, "text": "9 servers reached the end", "steps": 7}
    return {**step, "data": model.ended(step["data"], outcome)}


def wait(seconds: float) -> dict[str, Any]:
    return {"wait_s": seconds}


def text(identity: str) -> dict[str, Any]:
    return {"text": identity}


def test_a_job_of_which_nothing_new_comes_is_shown_as_old() -> None:
    """Behind a tunnel that passes nothing more, and when the launcher is stopped, no error comes."""
    before, silent, again = played(
        *[shown(), text("connection"), wait(20), text("connection"), shown(1.8e9 + 20), text("connection")]
    )
    assert before is None
    assert "No word from the launcher since" in silent
    assert "what is shown is old" in silent
    assert again is None


def test_what_comes_again_as_it_was_is_no_news() -> None:
    """A stream that is opened again begins with the newest page, and the launcher may be stopped."""
    found = played(shown(), *[wait(4), {"open": True}, shown()] * 3, text("connection"))
    assert "No word from the launcher since" in found[0]


def test_a_job_that_is_heard_of_is_never_shown_as_old() -> None:
    pages = [each for second in range(60) for each in (shown(1.8e9 + second), wait(1), text("connection"))]
    assert played(*pages) == [None] * 60


def test_a_stream_that_breaks_is_said_at_once_and_one_that_is_refused_for_good() -> None:
    broken, refused = played(shown(), {"error": 0}, text("connection"), {"error": 2}, text("connection"))
    assert "Trying again" in broken
    assert "Load the page again" in refused


def test_a_job_that_has_ended_does_not_grow_old() -> None:
    assert played(last(), wait(60), text("connection")) == [None]


def test_a_cut_nic_is_still_drawn_when_its_job_has_ended() -> None:
    well, cut = played(last(), {"drawn": "drawing"}, last(failures=["link:4/0"]), {"drawn": "drawing"})
    assert "g nic level-0 dead" not in well
    assert cut.count("g nic level-0 dead") == 1


def test_the_label_of_a_part_is_drawn_over_its_cross() -> None:
    drawn = played({"drawn": "drawing"})[0]
    parts = " ".join(each.strip() for each in drawn).split("g part ")[1:]
    assert len(parts) == 6 + 9
    assert [each for each in parts if each.index("path cross") > each.index("text")] == []


def test_the_page_of_an_ended_job_does_not_say_that_its_parts_work() -> None:
    assert played(shown(), text("troubles"), last(), text("troubles")) == [
        "Nothing: all parts work.",
        "Nothing was known to be broken.",
    ]
