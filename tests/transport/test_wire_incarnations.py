"""A server in a later incarnation, and an earlier one with the same token: only that of the view counts."""

from __future__ import annotations

import socket

import pytest
from wires import JOB, TOKEN, Recorder, Wires, header, heartbeat, nic, over, polled

from bml.io.poller import Poller
from bml.transport import Kind, TcpTransport
from bml.transport.handshake.auth import AcceptorHandshake, DialerHandshake, Hello, Role
from bml.transport.handshake.sealing import Heartbeat, seal_heartbeat
from bml.transport.links.parking import Parking

NOW = 7
"""The incarnation in which the view has server 0."""


def dial(wires: Wires, incarnation: int, **options: object) -> tuple[Recorder, TcpTransport]:
    """Server 0 in some incarnation, dialling server 1."""
    handler = Recorder(4)
    transport = wires.make(0, handler, incarnation=incarnation, **options)
    transport.set_peers({(1, 0): wires.transports[1].endpoints[0]})
    return handler, transport


def test_a_dialler_wants_a_certain_incarnation() -> None:
    me = Hello(Role.DATA, b"job", 1, 0, incarnation=3)
    here, there = ("127.0.0.1", 1), ("127.0.0.1", 2)
    for expected, ok in ((3, True), (0, False), (4, False)):
        acceptor = AcceptorHandshake(b"token", me, b"a" * 32)
        dialer = DialerHandshake(b"token", me._replace(server=0, incarnation=0), b"d" * 32, 1, expected)
        dialer.start(there, here)
        dialer.feed(acceptor.feed(dialer.feed(acceptor.start(here, there))))
        assert dialer.done is acceptor.done is ok
        assert acceptor.peer == (me._replace(server=0, incarnation=0) if ok else None)
        assert ok or "another incarnation" in dialer.error


@pytest.mark.parametrize("used", [False, True])
def test_a_zombie_cannot_take_the_place_of_its_successor(used: bool) -> None:
    with Wires(2, 1, nbytes=4) as wires:
        one = wires.transports[1]
        handler, successor = dial(wires, NOW)
        one.set_peers({(0, 0): successor.endpoints[0]}, {0: NOW})
        wires.until(lambda: one.is_up(0, 0), "the successor")
        if used:
            one.send(0, 0, header(Kind.TOKEN), None)
            wires.until(lambda: handler.frames, "its connection is used")
        for incarnation in (0, NOW - 1):
            zombie_handler, zombie = dial(wires, incarnation, connect_s=0.3)
            wires.until(lambda z=zombie_handler: z.losses, "the zombie is shown out", 10.0)  # type: ignore[misc]
            zombie.close()
        assert wires.handlers[1].losses == []
        assert not one._parking._sockets
        successor.send(1, 0, header(0, 0, 4), memoryview(b"abcd"))
        wires.until(lambda: wires.handlers[1].frames, "the successor goes on")
        assert wires.handlers[1].memory == b"abcd"
        successor.close()


def test_a_successor_waits_for_the_view_and_takes_no_place_before() -> None:
    with Wires(2, 1, nbytes=4) as wires:
        wires.connect()
        one = wires.transports[1]
        one.send(0, 0, header(Kind.TOKEN), None)
        wires.until(lambda: wires.handlers[0].frames, "the first incarnation is connected")
        _, successor = dial(wires, NOW)
        successor.send(1, 0, header(0, 0, 4), memoryview(b"abcd"))
        wires.until(lambda: one._parking._sockets, "the successor waits")
        assert one.is_up(0, 0)
        assert wires.handlers[1].losses == []
        one.set_peers({(0, 0): successor.endpoints[0]}, {0: NOW})
        wires.until(lambda: wires.handlers[1].frames, "its frame, once the view says so")
        assert wires.handlers[1].memory == b"abcd"
        successor.close()


def test_a_zombie_that_came_first_is_not_taken_for_its_successor() -> None:
    with Wires(2, 1, nbytes=4) as wires:
        one = wires.transports[1]
        _, zombie = dial(wires, 0)
        wires.until(lambda: one._parking._sockets, "the zombie waits")
        _, successor = dial(wires, NOW)
        one.set_peers({(0, 0): successor.endpoints[0]}, {0: NOW})
        successor.send(1, 0, header(0, 0, 4), memoryview(b"abcd"))
        wires.until(lambda: wires.handlers[1].frames, "the successor's frame")
        assert wires.handlers[1].memory == b"abcd"
        for transport in (zombie, successor):
            transport.close()


def test_no_server_dials_into_another_incarnation() -> None:
    """Server 1 came again, and by chance listens where it did before."""
    with Wires(1, 1) as wires:
        again = wires.make(1, Recorder(), incarnation=NOW, connect_s=0.3)
        before = wires.make(0, wires.handlers[0], connect_s=0.3)
        before.set_peers({(1, 0): again.endpoints[0]})
        wires.until(lambda: wires.handlers[0].losses, "the deadline")
        assert "another incarnation" in wires.handlers[0].losses[0][3]
        before.set_peers({(1, 0): again.endpoints[0]}, {1: NOW})
        wires.until(lambda: before.is_up(1, 0), "the incarnation that the view names")
        before.close()
        again.close()


def test_heartbeats_of_a_zombie_keep_no_server_alive() -> None:
    with Wires(2, 1) as wires, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as zombie:
        wires.connect()
        zombie.bind((nic(0, 0), 0))
        target = wires.transports[1].endpoints[0]
        for sequence in range(1 << 62, (1 << 62) + 20):
            zombie.sendto(seal_heartbeat(TOKEN, JOB.encode(), Heartbeat(0, 1, 0, sequence)), target)
        heartbeats = wires.transports[1].nics[0].heartbeats
        wires.until(lambda: heartbeats.rejected == 20, "all are rejected")
        assert wires.handlers[1].heard_from == []
        heartbeat(wires, 0, 1, 0)
        wires.until(lambda: wires.handlers[1].heard_from, "a heartbeat from where server 0 listens")


def test_parking_keeps_the_latest_incarnation() -> None:
    poller = Poller()
    parking = Parking(poller)
    pairs = [socket.socketpair() for _ in range(3)]
    for (ours, _), incarnation in zip(pairs, (3, 5, 4), strict=True):
        parking.put((0, 0), ours, incarnation)
    assert [ours.fileno() < 0 for ours, _ in pairs] == [True, False, True]
    assert parking.take((0, 0), 4) is None, "a later incarnation is not for this view"
    assert parking.take((0, 0), 5) is pairs[1][0]
    parking.put((0, 0), pairs[1][0], 5)
    assert parking.take((0, 0), 6) is None
    assert pairs[1][0].fileno() < 0, "an earlier incarnation is of no use any more"
    for _, theirs in pairs:
        theirs.close()
    polled(poller, 0.0)
    poller.close()


def test_strangers_cannot_fill_the_disk_with_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with Wires(2, 1) as wires:
        wires.connect()
        for _ in range(100):
            with socket.create_connection(wires.transports[1].endpoints[0], timeout=5) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                wires.until(lambda s=stranger: over(s), "it is closed")  # type: ignore[misc]
        lines = [record for record in caplog.records if "closed a connection" in record.getMessage()]
        assert 1 <= len(lines) < 50, "one a second, and this does not take a minute"
        assert "not a handshake of ours" in lines[0].getMessage()
