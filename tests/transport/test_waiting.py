"""For how long bytes wait for the kernel, and how many it takes meanwhile: what rates are measured by."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from bml.io.sendqueue import Counters, SendQueue
from bml.transport.handshake.flows import flow_of

DEADLINE_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connected TCP pair with small buffers; the first end does not block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        with socket.create_connection(server.getsockname()) as out:
            out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
            out.setblocking(False)
            into, _ = server.accept()
            with into:
                yield out, into


def test_only_the_time_counts_in_which_bytes_wait() -> None:
    counters = Counters()
    queue = SendQueue(counters)
    counters.nbytes_sent = 1000
    assert queue.waited(1.0) == (0, 0.0)
    queue.set_waiting(True, 2.0)
    counters.nbytes_sent += 500
    assert queue.waited(2.5) == (500, 0.5), "while they still wait"
    queue.set_waiting(False, 3.0)
    counters.nbytes_sent += 70_000
    assert queue.waited(9.0) == (500, 1.0)
    queue.set_waiting(True, 10.0)
    counters.nbytes_sent += 100
    queue.set_waiting(False, 10.25)
    assert queue.waited(20.0) == (600, 1.25)


def test_the_time_in_which_the_peer_has_no_room_is_not_busy(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A peer that does not read closes its window: that is no slow path, however long bytes wait for it."""
    out, _ = pair
    begin = time.monotonic()
    with suppress(BlockingIOError):
        while time.monotonic() < begin + DEADLINE_S:
            out.send(bytes(64 << 10))
    waits_since = time.monotonic()
    time.sleep(0.5)  # the kernel counts this time as one in which the window was closed
    now = time.monotonic()
    waited = (9000, now - waits_since)
    flow = flow_of(out, waited)
    assert flow.outstanding
    assert flow.nbytes == 9000
    assert flow.busy_s < now - begin - 0.3
    assert flow_of(out).busy_s == 0
    assert flow_of(out)[:3] == flow[:3]
