"""Which faults of a plan struck, from what survivors say and from when servers were lost."""

from __future__ import annotations

from math import inf

import pytest

from bml.faults import FaultPlan
from bml.faults.outcome import Stay, never_struck, stays
from bml.topology import parse

FABRIC = parse("bcube:3x2")


def view(commit: int, *members: int) -> dict[str, object]:
    return {"members": list(members), "commit": commit}


def unstruck(
    plan: str, *lost: Stay, struck: tuple[str, ...] = (), begun: tuple[str, ...] = ()
) -> dict[str, str]:
    return never_struck(FaultPlan.parse(plan), FABRIC, struck, lost, begun)


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        ("kill:1@step=8", Stay(1, None, 7)),
        ("kill:1@step=1", Stay(1, None, 0)),
        ("cut:1/0@step=3 kill:1@step=8", Stay(1, None, 7)),
        ("kill:1@step=8,phase=broadcast", Stay(1, 5, 7)),
        ("kill:1@phase=start", Stay(1, None, inf)),
        ("kill:1@phase=transfer", Stay(1, 5, 5)),
        ("freeze:1@t=1s", Stay(1, None, 7)),
        ("freeze:1@t=3s", Stay(1, None, 7, 2.5)),
        ("switch:0/0@step=8", Stay(1, None, 7)),
        ("stall:0/0,peer=1@step=8", Stay(1, None, 7)),
    ],
)
def test_what_was_due_on_a_server_that_was_lost_has_struck(plan: str, lost: Stay) -> None:
    assert unstruck(plan, lost) == {}


@pytest.mark.parametrize(
    ("plan", "lost", "why"),
    [
        ("kill:1@step=99", Stay(1, None, 7), "step 99 never came while server 1 was in the job"),
        ("kill:1@step=5", Stay(1, 5, 9), "step 5 never came while server 1 was in the job"),
        ("kill:1@phase=start", Stay(1, 5, 9), "the phase start never came while server 1 was in the job"),
        ("kill:1@t=2s", Stay(1, 5, 9), "the time 2 s after the first view never came while server 1 was in"),
        (
            "kill:1@t=60s",
            Stay(1, None, 9, 7.5),
            "the time 60 s after the first view never came while server 1",
        ),
        ("kill:1@step=5", Stay(2, None, 9), "step 5 never came while server 1 was in the job"),
        ("cut:1/0@step=5", Stay(2, None, 9), "step 5 never came while link 1/0 was in the job"),
        ("coordinator@step=5", Stay(1, None, 9), "step 5 never came"),
    ],
)
def test_what_was_not_due_has_not(plan: str, lost: Stay, why: str) -> None:
    (found,) = unstruck(plan, lost).values()
    assert found.startswith(why)


def test_what_a_server_says_counts() -> None:
    plan = "kill:1@step=99 switch:0/1@step=4 coordinator@step=4"
    said = ("switch:0/1@step=4", "coordinator@step=4")
    assert list(unstruck(plan, struck=said)) == ["kill:1@step=99"]


def test_a_join_counts_only_if_a_server_was_started_for_it() -> None:
    join = "join:1@step=3"
    assert unstruck(join, struck=(join,), begun=(join,)) == {}
    assert unstruck(join, struck=(join,)) == {join: "server 1 was there already, or the job was over"}
    assert unstruck(join) == {join: "step 3 never came"}


def test_what_could_not_be_done_has_not_struck() -> None:
    cut = "cut:1/0@step=3"
    found = never_struck(
        FaultPlan.parse(cut), FABRIC, (cut,), [Stay(1, None, 7)], not_injected={cut: "no device b0"}
    )
    assert found == {cut: "it could not be injected: no device b0"}


def test_stays_are_read_from_the_views() -> None:
    views = [view(0, 0, 1, 2), view(4, 0, 2), view(9, 0, 1, 2), view(12, 0, 2)]
    assert stays(views, dead=[1], told=[]) == [Stay(1, None, 4), Stay(1, 9, 12)]
    assert stays(views, dead=[1], told=[1]) == [Stay(1, None, 4)], "in its last incarnation it has told"
    assert stays(views, dead=[1, 2], told=[1]) == [Stay(1, None, 4), Stay(2, None, inf)]
    assert stays(views, dead=[7], told=[1])[-1] == Stay(7, None, inf), "it was lost before the first view"
    timed = [{**each, "at_s": at_s} for each, at_s in zip(views, (0.0, 2.5, None, 9.0), strict=True)]
    assert stays(timed, dead=[1], told=[]) == [Stay(1, None, 4, 2.5), Stay(1, 9, 12, 9.0)]
    assert stays([], dead=[0], told=[]) == [Stay(0, None, inf)]
    came_again = views[:3]
    assert stays(came_again, dead=[], told=[0, 1, 2]) == [Stay(1, None, 4)], (
        "it told of the incarnation after"
    )
