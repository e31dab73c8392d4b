"""What the kernel delivers while more bytes wait for it, and how long that takes: rates come of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from bml.io.backlog import Backlog
from bml.transport.handshake.flows import flow_of

DEADLINE_S = 30.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connected TCP pair with small buffers, of which no end blocks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        with socket.create_connection(server.getsockname()) as out:
            out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
            into, _ = server.accept()
            with into:
                out.setblocking(False)
                into.setblocking(False)
                yield out, into


def fill(out: socket.socket) -> int:
    """Write until the kernel takes no more; returns how many bytes it took."""
    nbytes = 0
    with suppress(BlockingIOError):
        while True:
            nbytes += out.send(bytes(64 << 10))
    return nbytes


def drain(pair: Pair, nbytes: int) -> None:
    """Read so many bytes, and wait until the sender's kernel knows that they have arrived."""
    out, into = pair
    deadline_s = time.monotonic() + DEADLINE_S
    while nbytes or flow_of(out).outstanding:
        assert time.monotonic() < deadline_s
        with suppress(BlockingIOError):
            nbytes -= len(into.recv(1 << 20))


def test_only_the_bytes_count_that_arrive_while_others_wait(pair: Pair) -> None:
    backlog, out = Backlog(), pair[0]
    drain(pair, fill(out))
    assert backlog.moved(out) == (0, 0.0)
    taken = fill(out)
    before = flow_of(out).answers
    backlog.note(out, True)
    drain(pair, taken)
    nbytes, busy_s = backlog.moved(out)
    assert 0 < nbytes <= taken, "what was acknowledged before does not count"
    assert nbytes <= flow_of(out).answers - before
    backlog.note(out, False)
    drain(pair, fill(out))
    assert backlog.moved(out)[0] == nbytes
    backlog.note(out, True)
    drain(pair, fill(out))
    backlog.note(out, False)
    again, longer_s = backlog.moved(out)
    assert again > nbytes
    assert longer_s >= busy_s


@pytest.mark.serial("the kernel counts the time in which a window was closed")
def test_the_time_in_which_the_peer_has_no_room_is_not_busy(pair: Pair) -> None:
    """A peer that does not read closes its window: that is no slow path, however long bytes wait for it."""
    backlog, out = Backlog(), pair[0]
    fill(out)
    backlog.note(out, True)
    begin = time.monotonic()
    time.sleep(0.5)  # the kernel counts this time as one in which the window was closed
    waited_s = time.monotonic() - begin
    assert backlog.moved(out)[1] < waited_s - 0.3
    assert flow_of(out).outstanding


def test_the_time_in_which_the_sender_does_not_run_is_not_busy(pair: Pair) -> None:
    """The kernel has delivered all that it had: the path is idle, although more bytes wait in the process."""
    backlog, out = Backlog(), pair[0]
    taken = fill(out)
    backlog.note(out, True)
    drain(pair, taken)
    moved = backlog.moved(out)
    time.sleep(0.3)
    assert backlog.moved(out) == moved


def test_a_connection_that_has_ended_does_no_harm(pair: Pair) -> None:
    backlog, out = Backlog(), pair[0]
    backlog.note(out, True)
    out.close()
    backlog.note(out, False)
    assert backlog.moved(out) == (0, 0.0)


def test_a_flow_says_what_its_backlog_moved(pair: Pair) -> None:
    out = pair[0]
    assert flow_of(out, (900, 0.5))[3:] == (900, 0.5)
    assert flow_of(out)[3:] == (0, 0.0)
