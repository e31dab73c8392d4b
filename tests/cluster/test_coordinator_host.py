"""What a parent hears of the coordinators that run for it: their signs of life, snapshots and ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bml.cluster.process import coordinator
from bml.cluster.process.coordinator import CoordinatorHost
from bml.cluster.spec.job import Contact, JobSpec
from bml.protocol.coordinator import core as core

SPEC = JobSpec("bcube:2x1")
DEADLINE_S = 10.0


class Loop:
    """Stands for a CoordinatorLoop: it does nothing until the test lets it end."""

    made: list[Loop]

    def __init__(
        self, spec: JobSpec, contacts: Any, incarnations: Any, term: int, on_change: Any, on_heartbeat: Any
    ):
        self.began = (spec, contacts, incarnations, term)
        self.on_change: Callable[[dict[str, Any]], None] = on_change
        self.on_heartbeat: Callable[[], None] = on_heartbeat
        self.told: list[Any] = []
        self.deposed_by = 0
        self._ends = threading.Event()
        self.made.append(self)

    def run(self) -> None:
        assert self._ends.wait(DEADLINE_S)

    def say(self, event: core.Event) -> None:
        self.told.append(event)

    def join(self, *joined: Any) -> None:
        self.told.append(joined)

    def close(self) -> None:
        self._ends.set()


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Loop]]:
    Loop.made = []
    monkeypatch.setattr(coordinator, "CoordinatorLoop", Loop)
    yield Loop.made
    for each in Loop.made:
        each.close()


class Clock:
    """Stands for the module time: the test says what time it is."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


Said = queue.SimpleQueue[tuple[Any, ...]]


def hosted(said: Said, asked_for_snapshots: bool = True) -> CoordinatorHost:
    return CoordinatorHost(lambda *words: said.put(words), lambda: None, asked_for_snapshots)


def taken(said: Said) -> list[tuple[Any, ...]]:
    found = []
    while not said.empty():
        found.append(said.get())
    return found


def test_each_group_has_its_coordinator_and_the_newest_one_is_told(loops: list[Loop]) -> None:
    said = Said()
    host = hosted(said)
    contact = Contact(1, ("127.0.0.1", 9), (("127.0.0.1", 9),))
    host.take("join", "one", 1, 7, contact)  # before there is one: the next one will be told
    for group, term in (("one", 1), ("other", 1), ("one", 3)):
        host.take("start", group, SPEC, {}, {}, term)
    host.take("join", "one", 1, 8, contact)
    host.take("gone", "other", 0, "it died")
    assert [loop.began for loop in loops] == [(SPEC, {}, {}, term) for term in (1, 1, 3)]
    assert [loop.told for loop in loops] == [[], [core.Gone(0, "it died")], [(1, 8, contact)]]
    taken(said)
    loops[2].on_change({"state": "steady"})
    assert taken(said) == [("changed", "one", 3, {"state": "steady"})]
    loops[0].deposed_by = 3
    loops[0].close()
    assert said.get(timeout=DEADLINE_S) == ("ended", "one", 1, 3)
    host.take("gone", "one", 2, "it died")  # the newest one is still told
    assert loops[2].told[-1] == core.Gone(2, "it died")


def test_snapshots_are_told_only_to_a_parent_that_asks(loops: list[Loop]) -> None:
    said = Said()
    hosted(said, asked_for_snapshots=False).take("start", "group", SPEC, {}, {}, 1)
    taken(said)
    loops[0].on_change({"state": "steady"})
    assert taken(said) == []


def test_one_coordinator_that_hangs_silences_its_process(
    loops: list[Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, clock = Said(), Clock()
    monkeypatch.setattr(coordinator, "time", clock)
    host = hosted(said)
    host.turned()
    assert taken(said) == [("alive",)], "an idle process lives"
    for group in ("hangs", "goes on"):
        host.take("start", group, SPEC, {}, {}, 1)
    taken(said)
    host.turned()
    assert taken(said) == [], "where coordinators run, they say so themselves"
    loops[1].on_heartbeat()
    assert taken(said) == [("alive",)]
    for _ in range(10):
        clock.now += 0.25
        taken(said)
        loops[1].on_heartbeat()
    assert taken(said) == []
    loops[0].on_heartbeat()
    assert taken(said) == [("alive",)], "it was only slow"
    for loop in loops:
        loop.close()
        assert said.get(timeout=DEADLINE_S)[0] == "ended"
    host.turned()
    assert taken(said) == [("alive",)]
