"""The story of a part, from what recordings tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bml.protocol.record.story import Moment, Seen, Told, explain, view_lines
from bml.protocol.wire import messages as msg
from bml.topology import parse

ENDED = "only 8 of 9 servers are left; server 4 is dead: its process is gone: it refuses connections"


def seen(epoch: int, at_s: float, members: tuple[int, ...] = tuple(range(9)), reason: str = "start") -> Seen:
    record: Any = SimpleNamespace(
        view=msg.View(epoch, members, (), 10, reason, 0.0), installed_at_s=at_s, recover_s=None
    )
    return Seen(0, 0.0, record)


def told(*moments: Moment, views: tuple[Seen, ...] = ()) -> Told:
    shown = {each.record.view.epoch: [each] for each in views or (seen(1, 100.0),)}
    return Told(parse("bcube:3x2"), (), moments, shown, frozenset(range(9)))


def lost(observer: int, at_s: float, kind: str = "reset") -> Moment:
    return Moment(at_s, observer, msg.Suspect(observer, 4, 0, kind, 0.0, "why"))


ABORTED = Moment(101.5, 0, msg.Abort(0, "too-few", ENDED))


def test_a_death_that_ended_the_job_is_told_with_the_end() -> None:
    """No view without the server was made."""
    lines = explain(told(lost(3, 101.0), lost(5, 101.25), ABORTED), "server:4")
    assert lines[0] == (
        "server:4 is in use in all views of the recording (view 1); the job ended before the next one"
    )
    assert lines[1].startswith("+0.000 s servers 3, 5 ")
    assert lines[2] == f"+0.500 s the job ended: {ENDED}"
    assert explain(told(ABORTED), "server:5")[0].startswith("server:5 did not go: it is in use in all views")


def test_the_views_end_with_the_error_of_the_job() -> None:
    later = Moment(101.75, 1, msg.Abort(0, "too-few", ENDED))
    assert view_lines(told(ABORTED, later)) == [
        "view 1: 9 servers, after step 10 (start)",
        f"the job ended: {ENDED}",
    ]
    assert view_lines(told()) == ["view 1: 9 servers, after step 10 (start)"]


@pytest.mark.parametrize("moments", [(), (ABORTED,)])
def test_a_part_that_went_is_told_by_its_view(moments: tuple[Moment, ...]) -> None:
    without = tuple(server for server in range(9) if server != 4)
    views = (seen(1, 100.0), seen(2, 101.2, without, "server 4 is dead"))
    lines = explain(told(lost(3, 101.0), *moments, views=views), "server:4")
    assert lines[0] == "server:4 went in view 2, after step 10: server 4 is dead"
    assert "it is still out at the end of the recording" in lines


@pytest.mark.parametrize(
    ("kind", "of_one", "of_two"),
    [
        ("silence", "hears nothing", "hear nothing"),
        ("reset", "lost its connections", "lost their connections"),
        ("stall", "has connections that stand still", "have connections that stand still"),
        ("own-nic", "has no carrier", "have no carrier"),
    ],
)
def test_verbs_fit_the_number_of_servers(kind: str, of_one: str, of_two: str) -> None:
    one, other = lost(3, 101.0, kind), lost(5, 101.0, kind)
    assert explain(told(one), "server:4")[1] == f"+0.000 s server 3 {of_one}: why"
    assert explain(told(one, other), "server:4")[1] == f"+0.000 s servers 3, 5 {of_two} (until +0.000 s): why"


def test_one_server_that_says_it_twice_is_one() -> None:
    twice = told(lost(3, 101.0, "silence"), lost(3, 101.0, "silence"))
    assert explain(twice, "server:4")[1] == "+0.000 s server 3 hears nothing (until +0.000 s): why"


def test_suspicions_that_are_far_apart_are_told_apart() -> None:
    close, far = (lost(3, 101.0, "silence"), lost(5, 103.0, "silence")), lost(5, 143.0, "silence")
    assert explain(told(*close, far), "server:4")[1:] == [
        "+0.000 s servers 3, 5 hear nothing (until +2.000 s): why",
        "+42.000 s server 5 hears nothing: why",
    ]


def test_of_many_suspicions_the_last_are_told_and_the_end_is_not_cut_off() -> None:
    again = [lost(3, 101.0 + 10 * each, "silence") for each in range(30)]
    lines = explain(told(*again, Moment(400.0, 0, msg.Abort(0, "too-few", ENDED))), "server:4")
    assert lines[1] == "+0.000 s it was suspected 25 times until +240.000 s"
    assert [line.partition(" server")[0] for line in lines[2:-1]] == [
        f"+{each}0.000 s" for each in range(25, 30)
    ]
    assert lines[-1].endswith(ENDED)
