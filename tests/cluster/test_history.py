"""What a launcher keeps of the past of a job, for its status."""

from __future__ import annotations

from typing import Any

from bml.cluster.fleets.fleet import Changed, Died, NotInjected, Reported
from bml.cluster.launcher.history import MOST_EVENTS, MOST_VIEWS, History
from bml.cluster.spec.job import ServerReport
from bml.cluster.spec.leaving import LEFT


def snapshot(**other: Any) -> dict[str, Any]:
    said = {"term": 1, "epoch": 1, "members": [0, 1, 2], "failures": [], "slow": {}, "reason": "start"}
    return {**said, "noticed_s": 0.0, "suspicions": [], "waiting": [], **other}


def texts(history: History) -> list[tuple[str, str]]:
    return [(each["kind"], each["text"]) for each in history.events]


def test_a_view_is_kept_once_with_its_time() -> None:
    history = History()
    history.heard(Changed(snapshot(epoch=0, members=[])), 0.5)
    history.heard(Changed(snapshot()), 1.0)
    history.heard(Changed(snapshot()), 2.0)
    history.heard(Changed(snapshot(epoch=2, members=[0, 1], reason="server 2 is dead", noticed_s=0.1)), 3.0)
    assert [(view["epoch"], view["at_s"], view["members"]) for view in history.views] == [
        (1, 1.0, [0, 1, 2]),
        (2, 3.0, [0, 1]),
    ]
    assert texts(history) == [
        ("view", "view 1: 3 servers (start)"),
        ("view", "view 2: 2 servers (server 2 is dead)"),
    ]


def test_a_new_coordinator_that_has_no_view_yet_brings_no_view_twice() -> None:
    history = History()
    for each in (snapshot(), snapshot(term=2, epoch=0, members=[]), snapshot(term=2)):
        history.heard(Changed(each), 1.0)
    assert [view["epoch"] for view in history.views] == [1]
    assert texts(history)[1:] == [("coordinator", "coordinator 2 has taken over")]


def test_what_stands_is_said_once_and_again_when_it_comes_again() -> None:
    history = History()
    for suspicions in ([], ["a"], ["a", "b"], [], ["a"]):
        history.heard(Changed(snapshot(suspicions=suspicions)), 1.0)
    assert [text for kind, text in texts(history) if kind == "suspected"] == ["a", "b", "a"]


def test_deaths_and_joiners_and_faults() -> None:
    history = History()
    history.heard(Died(4, "its process was killed by signal 9"), 1.0)
    history.heard(NotInjected("cut:4/0@t=1s", "it is gone"), 1.0)
    history.heard(Changed(snapshot(waiting=[4])), 2.0)
    history.note("fault", "injected: kill:4", 3.0)
    report = ServerReport(2, "stopped", None, "it got SIGTERM", LEFT, "", "", None, [], {})
    history.heard(Reported(report), 3.0)
    kinds = [kind for kind, _ in texts(history)]
    assert kinds == ["lost", "fault", "joining", "view", "fault", "left"]
    assert texts(history)[-1][1] == "server 2: it got SIGTERM"
    assert texts(history)[0][1] == "server 4: its process was killed by signal 9"


def test_little_is_kept() -> None:
    history = History()
    for epoch in range(1, 1000):
        history.heard(Changed(snapshot(epoch=epoch)), float(epoch))
    assert [view["epoch"] for view in history.views] == list(range(1000 - MOST_VIEWS, 1000))
    assert len(history.events) == MOST_EVENTS
