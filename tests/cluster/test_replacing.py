"""Which lost servers are replaced by spares, and which are started again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import bml
from bml.cluster.launcher.newcomers import Newcomers
from bml.cluster.launcher.restarts import DIED, Spares, is_worth_it
from bml.cluster.launcher.result import Result
from bml.cluster.spec.job import JobSpec
from bml.cluster.spec.leaving import DRAINED
from bml.errors import StartError, UsageError

pytestmark = pytest.mark.timeout(30)


def test_the_first_lost_servers_are_replaced() -> None:
    spares = Spares(2)
    assert [spares.take(kind) for kind in (DIED, "NotJoined", "Left", "Evicted")] == [
        True,
        False,
        True,
        False,
    ]
    assert spares.left == 0


def test_a_server_that_was_asked_to_go_is_replaced_and_not_started_again() -> None:
    assert not is_worth_it("Left")
    assert is_worth_it(DIED)
    assert is_worth_it(DRAINED), "but not on that machine"
    assert Spares(1).take("Left")


@pytest.mark.parametrize(
    ("spares", "rejoin", "started"), [(1, False, [3]), (1, True, [3, 2]), (0, False, [])]
)
def test_spares_go_before_servers_that_are_started_again(
    spares: int, rejoin: bool, started: list[int]
) -> None:
    result = Result(JobSpec("bcube:2x2", spares=spares, rejoin=rejoin))
    came = list[tuple[int, int]]()

    def join(server: int, incarnation: int, give_up: threading.Event) -> None:
        came.append((server, incarnation))

    newcomers, missing = Newcomers(join, result, lambda server: False, lambda: False), set[int]()
    for server in (3, 2):
        result.dead[server] = "it was killed"
        newcomers.lost(server)
        newcomers.start(missing)
        newcomers.close()
    assert sorted(came) == sorted((server, number + 1) for number, server in enumerate(started))
    assert missing == {*started}
    assert sorted(result.dead) == sorted({2, 3} - {*started})
    assert newcomers.spares_left == 0


@pytest.mark.parametrize(
    ("settings", "comes"),
    [({"rejoin": True}, True), ({"least": 2}, True), ({}, False), ({"spares": 1}, True)],
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

    newcomers, missing = Newcomers(join, result, lambda server: False, lambda: False), set[int]()
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


def test_what_other_launchers_do_not_have_is_said_before_they_start() -> None:
    with pytest.raises(UsageError, match="take the launcher processes"):
        bml.launch(len, launcher="ray", spares=1)
    with pytest.raises(UsageError, match="take the launcher processes"):
        bml.launch(len, launcher="processes", emulated=True, spares=1)
    with pytest.raises(UsageError, match="take the launcher processes"):
        bml.launch(len, launcher="ray", emulated=True, servers=(6, 9))


@pytest.mark.parametrize("spares", [-1, 10, True, 1.0])
def test_how_many_spares_there_can_be(spares: int) -> None:
    with pytest.raises(UsageError, match="give a whole number, 9 at most"):
        JobSpec("bcube:3x2", spares=spares)
