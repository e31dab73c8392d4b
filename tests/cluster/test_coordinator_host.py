"""What a parent hears of the coordinators that run for it: their signs of life, snapshots and ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from bml.cluster.process import coordinator
from bml.cluster.process.coordinator import CoordinatorHost
from bml.cluster.process.logs import LogsAside
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


def test_each_group_has_its_coordinator_and_the_newest_one_is_told(loops: list[Loop]) -> None:
    said: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    host = CoordinatorHost(lambda *words: said.put(words), LogsAside(), asked_for_snapshots=True)
    contact = Contact(1, ("127.0.0.1", 9), (("127.0.0.1", 9),))
    host.take("join", "one", 1, 7, contact)  # before there is one: the next one will be told
    for group, term in (("one", 1), ("other", 1), ("one", 3)):
        host.take("start", group, SPEC, {}, {}, term)
    host.take("join", "one", 1, 8, contact)
    host.take("gone", "other", 0, "it died")
    assert [loop.began for loop in loops] == [(SPEC, {}, {}, term) for term in (1, 1, 3)]
    assert [loop.told for loop in loops] == [[], [core.Gone(0, "it died")], [(1, 8, contact)]]
    loops[2].on_change({"state": "steady"})
    assert said.get_nowait() == ("changed", "one", 3, {"state": "steady"})
    loops[0].deposed_by = 3
    loops[0].close()
    assert said.get(timeout=DEADLINE_S) == ("ended", "one", 1, 3)


def test_a_coordinator_that_hangs_gives_no_sign_of_life_and_nobody_gives_it_instead(
    loops: list[Loop],
) -> None:
    said: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    host = CoordinatorHost(lambda *words: said.put(words), LogsAside(), asked_for_snapshots=False)
    assert host.is_idle
    host.take("start", "group", SPEC, {}, {}, 1)
    assert not host.is_idle
    loops[0].on_change({"state": "steady"})
    assert said.empty()
    with closing(loops[0]) as loop:
        loop.on_heartbeat()
    assert said.get_nowait() == ("alive",)
    assert said.get(timeout=DEADLINE_S) == ("ended", "group", 1, 0)
    assert host.is_idle
