"""A server that needs a coordinator and hears none gives up in the end, and says what it waited for."""

from __future__ import annotations

import pytest

from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.server import ServerCore
from bml.protocol.timeouts import Timeouts
from bml.schedule import Programs, Schedules
from topology import Fabric, FabricError, bcube

TIMES = Timeouts.of(0.5)


def core() -> ServerCore:
    def planner(fabric: Fabric, server: int) -> Programs:
        return Programs(Schedules(fabric, "packed"), server)

    return ServerCore(0, bcube(2, 1), planner, TIMES, lambda nbytes: 1 << 16, 0.0)


def install(server: ServerCore, epoch: int, now: float) -> None:
    view = msg.View(epoch, (0, 1), (), 0, "test", 0.0)
    for message in (msg.Freeze(1, epoch, "test"), msg.Propose(1, view), msg.Install(1, epoch)):
        server.handle(ev.Control(message), now)


def stops(server: ServerCore, now: float) -> list[ev.Stop]:
    return [each for each in server.handle(ev.Tick(), now) if isinstance(each, ev.Stop)]


def test_no_first_view() -> None:
    server = core()
    assert not stops(server, 0.0)
    assert not stops(server, TIMES.orphan_s)
    (stop,) = stops(server, TIMES.orphan_s + 0.1)
    assert isinstance(stop.error, FabricError)
    assert "is there a coordinator?" in str(stop.error)


@pytest.mark.parametrize("trouble", ["suspicion", "freeze"])
def test_trouble_that_no_view_answers(trouble: str) -> None:
    server = core()
    install(server, 1, 0.0)
    server.heard(1, 0, 99.9)
    if trouble == "suspicion":
        server.handle(ev.PeerLost(1, 0, "eof", "gone"), 100.0)
    else:
        server.handle(ev.Control(msg.Freeze(1, 2, "test")), 100.0)
    assert not stops(server, 100.0)
    assert not stops(server, 100.0 + TIMES.orphan_s)
    assert stops(server, 100.1 + TIMES.orphan_s)


def test_a_new_view_ends_the_need() -> None:
    server = core()
    install(server, 1, 0.0)
    server.handle(ev.PeerLost(1, 0, "eof", "gone"), 100.0)
    assert not stops(server, 100.0)
    install(server, 2, 150.0)
    server.heard(1, 0, 250.0)
    assert not stops(server, 250.0)


def test_a_long_step_without_trouble_is_no_need() -> None:
    server = core()
    install(server, 1, 0.0)
    for now in range(0, 10_000, 1):
        server.heard(1, 0, now / 10)
        assert not stops(server, now / 10)
