"""A server that needs a coordinator and hears none gives up in the end; the error says why it waited."""

from __future__ import annotations

import pytest

from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.schedule import Programs, Schedules
from bml.topology import Fabric, FabricError, bcube

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


def said(server: ServerCore, now: float) -> list[msg.Ended]:
    return [each.message for each in server.handle(ev.Tick(), now) if isinstance(each, ev.Tell)]  # type: ignore[misc]


def done(now: float) -> ServerCore:
    server = core()
    install(server, 1, 0.0)
    server.heard(1, 0, now)
    assert server.handle(ev.Ended("done"), now) == [ev.Tell(msg.Ended(0, "done", "", 0))]
    return server


QUARTER_S = TIMES.orphan_s / 4


def test_a_server_that_is_done_gives_up_without_a_coordinator() -> None:
    server = done(10.0)
    for asked in (1, 2, 3):
        now = 10.0 + asked * QUARTER_S
        server.heard(1, 0, now)
        assert said(server, now - 0.1) == []
        assert said(server, now) == [msg.Ended(0, "done", "", 0)]
    server.heard(1, 0, 10.0 + TIMES.orphan_s)
    assert not stops(server, 10.0 + TIMES.orphan_s - 0.1)
    (stop,) = stops(server, 10.0 + TIMES.orphan_s)
    assert "no coordinator has answered for 120 s" in str(stop.error)
    assert not stops(server, 11.0 + 2 * TIMES.orphan_s)


def test_a_server_that_is_done_waits_as_long_as_a_coordinator_answers() -> None:
    server = done(10.0)
    for asked in range(1, 100):
        now = 10.0 + asked * QUARTER_S
        server.heard(1, 0, now)
        assert said(server, now) == [msg.Ended(0, "done", "", 0)]
        assert server.handle(ev.Control(msg.Noted(1)), now) == []


def test_a_deposed_coordinator_is_none() -> None:
    server = done(10.0)
    server.handle(ev.Control(msg.Who(2)), 10.0)
    for asked in (1, 2, 3):
        server.heard(1, 0, 10.0 + asked * QUARTER_S)
        assert said(server, 10.0 + asked * QUARTER_S)
        server.handle(ev.Control(msg.Noted(1)), 10.0 + asked * QUARTER_S)
    server.heard(1, 0, 10.0 + TIMES.orphan_s)
    assert stops(server, 10.0 + TIMES.orphan_s)


def test_time_in_which_a_server_was_stopped_itself_is_no_silence() -> None:
    server = done(10.0)
    server.heard(1, 0, 1000.0)
    assert said(server, 1000.0) == [msg.Ended(0, "done", "", 0)]
    server.heard(1, 0, 1000.0 + QUARTER_S)
    assert not stops(server, 1000.0 + QUARTER_S)
