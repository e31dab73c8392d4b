"""Which lost servers are replaced by spares, and which are started again."""

from __future__ import annotations

import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

import bml
from bml.cluster.launcher.join_manager import JoinManager
from bml.cluster.launcher.restarts import DIED, is_replaced, is_worth_it
from bml.cluster.launcher.result import Result
from bml.cluster.spec.job import JobSpec
from bml.cluster.spec.leaving import DRAINED
from bml.errors import StartError, UsageError

pytestmark = pytest.mark.timeout(30)


def test_who_is_replaced() -> None:
    assert [is_replaced(kind) for kind in (DIED, "NotJoined", "Left", "Evicted")] == [True, False, True, True]


def test_a_server_that_was_asked_to_go_is_replaced_and_not_started_again() -> None:
    assert not is_worth_it("Left")
    assert is_worth_it(DIED)
    assert is_worth_it(DRAINED), "but not on that machine"
    assert is_replaced("Left")
    assert is_replaced(DRAINED)


class Waiting:
    """So many spares, of which each takes the address of the lost server, or one that is given."""

    def __init__(self, left: int, address: int | None = None) -> None:
        self.left, self.address = left, address
        self.offered = list[list[int]]()
        self.aside = set[int]()
        self.is_started = False

    def start(self) -> None:
        self.is_started = True

    def set_aside(self, lost: int, free: Collection[int]) -> int | None:
        self.offered.append(sorted(free))
        if lost in self.aside:
            return lost
        if not self.left:
            return None
        self.left -= 1
        place = lost if self.address is None else self.address
        self.aside.add(place)
        return place

    def take(self, server: int) -> bool:
        """Whether the start of this server takes one."""
        is_spare = server in self.aside
        self.aside.discard(server)
        return is_spare


@pytest.mark.parametrize(
    ("spares", "rejoin", "started"), [(1, False, [3]), (1, True, [3, 2]), (0, False, [])]
)
def test_spares_go_before_servers_that_are_started_again(
    spares: int, rejoin: bool, started: list[int]
) -> None:
    waiting = Waiting(spares)
    came, missing, result = lose((3, 2), JobSpec("bcube:2x2", spares=spares, rejoin=rejoin), waiting)
    assert sorted(came) == sorted((server, number + 1) for number, server in enumerate(started))
    assert missing == {*started}
    assert sorted(result.dead) == sorted({2, 3} - {*started})
    assert waiting.left == 0


def test_a_spare_may_join_at_a_free_address() -> None:
    waiting = Waiting(2, address=1)
    came, missing, result = lose((3,), JobSpec("bcube:2x2", absent=(1,)), waiting)
    assert waiting.offered == [[1, 3]]
    assert came == [(1, 1)]
    assert missing == {1}
    assert result.dead == {3: "it was killed; a spare joins as server 1, where it is plugged in"}


def test_an_address_to_which_a_server_is_on_its_way_is_not_free() -> None:
    waiting = Waiting(1, address=1)
    came, _, _ = lose((3, 2), JobSpec("bcube:2x2", absent=(1,)), waiting)
    assert waiting.offered == [[1, 3], [2, 3]]
    assert came == [(1, 1)]


def lose(
    servers: tuple[int, ...], spec: JobSpec, spares: Waiting
) -> tuple[list[tuple[int, int]], set[int], Result]:
    """The servers that come with their incarnations, those that are waited for, and the result."""
    result, came, missing = Result(spec), list[tuple[int, int]](), set[int]()

    def join(server: int, incarnation: int, give_up: threading.Event) -> None:
        came.append((server, incarnation))

    newcomers = JoinManager(join, spares, result, lambda server: False, lambda: False)
    for server in servers:
        result.dead[server] = "it was killed"
        newcomers.lost(server)
        newcomers.start(missing)
        newcomers._join_starter.close()
    return came, missing, result


@pytest.mark.parametrize(
    ("settings", "comes"),
    [({"rejoin": True}, True), ({"min_start": 2}, True), ({}, False), ({"spares": 1}, True)],
)
def test_a_server_whose_machine_is_drained_comes_again_elsewhere(
    settings: dict[str, Any], comes: bool
) -> None:
    """It is tried for as long as it takes until another machine is there."""
    result = Result(JobSpec("bcube:2x2", **settings))
    tried = list[int]()

    def join(server: int, incarnation: int, give_up: threading.Event) -> None:
        tried.append(server)
        raise StartError("no Ray node is there")

    waiting, missing = Waiting(result.spec.spares), set[int]()
    newcomers = JoinManager(join, waiting, result, lambda server: False, lambda: False)
    result.dead[3] = "its Ray node is draining"
    newcomers.lost(3, DRAINED)
    newcomers.start(missing)
    newcomers.close()
    assert tried == [3] * comes
    assert missing == ({3} if comes else set())
    awaited = [3] if comes and not settings.get("spares") else []
    assert newcomers.awaited == awaited
    newcomers.start(missing)
    assert newcomers.awaited == awaited, "it is started again later"


class NoMachine:
    """Newcomers, none of which can be started; `tried` says of each start whether it took a spare."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int, **settings: Any):
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr("bml.cluster.launcher.join_manager.time", clock)
        self.spares, self.tried = Waiting(left), list[tuple[int, bool]]()
        self.result, self.missing = Result(JobSpec("bcube:2x2", **settings)), set[int]()
        self.all = JoinManager(self._join, self.spares, self.result, lambda server: False, lambda: False)

    def _join(self, server: int, incarnation: int, give_up: threading.Event) -> None:
        self.tried.append((server, self.spares.take(server)))
        raise StartError("no Ray node is there")

    def lost(self, server: int, kind: str) -> None:
        self.result.dead[server] = kind
        self.all.lost(server, kind)

    def start(self, at_s: float) -> None:
        self.now_s = at_s
        self.all.start(self.missing)
        self.all._join_starter.close()
        self.all.start(self.missing)  # takes the outcomes


def test_spares_wait_until_no_server_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a spare would take the machine that an awaited server waits for."""
    newcomers = NoMachine(monkeypatch, 0, min_start=2, spares=1)
    newcomers.all.await_late([2, 3])
    newcomers.start(0.0)
    assert newcomers.tried == [(2, False), (3, False)]
    assert not newcomers.spares.is_started
    for member in (2, 3):
        assert not newcomers.spares.is_started
        newcomers.all.seen({"term": 1, "asked": [], "learners": []}, [0, 1, member])
        newcomers.start(0.5)
    assert newcomers.spares.is_started


def test_spares_of_a_job_that_begins_with_all_servers_are_started_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newcomers = NoMachine(monkeypatch, 0, spares=1)
    newcomers.start(0.0)
    assert newcomers.spares.is_started


def test_an_awaited_server_takes_a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spare may wait for the next machine, too, and has asked Ray for it before."""
    newcomers = NoMachine(monkeypatch, 0, min_start=2, spares=1)
    newcomers.all.await_late([3])
    newcomers.start(0.0)
    newcomers.spares.left = 1
    newcomers.start(100.0)
    newcomers.start(200.0)
    assert newcomers.tried == [(3, False), (3, True), (3, False)]


@pytest.mark.parametrize("settings", [{"rejoin": True}, {"min_start": 2}])
def test_a_drained_server_whose_spare_does_not_come_is_tried_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a spare it is: for as long as it takes."""
    newcomers = NoMachine(monkeypatch, 1, spares=1, **settings)
    newcomers.lost(3, DRAINED)
    newcomers.start(0.0)
    assert newcomers.tried == [(3, True)]
    for start in range(1, 6):
        newcomers.start(100.0 * start)
    assert newcomers.tried == [(3, True), *[(3, False)] * 5]
    assert newcomers.all.awaited == [3]


def test_a_spare_for_a_drained_server_is_tried_again_where_it_is_plugged_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newcomers = NoMachine(monkeypatch, 1, absent=(1,), min_start=2)
    newcomers.spares.address = 1
    newcomers.lost(3, DRAINED)
    newcomers.start(0.0)
    newcomers.start(100.0)
    assert newcomers.tried == [(1, True), (1, False)]
    assert newcomers.all.awaited == [1]
    assert newcomers.result.dead[3] == "Drained; a spare joins as server 1, where it is plugged in"


def test_what_a_launcher_does_not_have_is_said_before_it_starts() -> None:
    with pytest.raises(UsageError, match="take the launcher processes"):
        bml.launch(len, launcher="ray", emulated=True, spares=1)
    with pytest.raises(UsageError, match="take the launcher processes"):
        bml.launch(len, launcher="ray", emulated=True, servers=(6, 9))


@pytest.mark.parametrize("spares", [-1, 10, True, 1.0])
def test_how_many_spares_there_can_be(spares: int) -> None:
    with pytest.raises(UsageError, match="give a whole number, 9 at most"):
        JobSpec("bcube:3x2", spares=spares)
