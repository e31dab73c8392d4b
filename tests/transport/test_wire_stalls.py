"""Connections that stand still while heartbeats pass: the kernel's counters of them, and probes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing import get_context

import pytest
from descriptors import opened
from wires import Wires, header, heartbeat, polled

from bml.faults.stalls import Flow, Stalls
from bml.transport import WAIT, Kind
from bml.transport.handshake.flows import flow_of, hold, release

DETECT_S = 0.5
MUCH_NBYTES = 16 << 20


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = opened()
    yield
    assert opened() == before


def stands_after_s(wires: Wires, server: int, peer: int, most_s: float) -> float | None:
    """Look as a loop does; seconds until the connection to `peer` stands still, None if it does not."""
    stalls, start_s = Stalls(DETECT_S), time.monotonic()
    while (now := time.monotonic()) < start_s + most_s:
        stalls.look(wires.transports[server].flows(), now)
        if (peer, 0) in stalls.standing(now):
            return now - start_s
        polled(wires.poller, DETECT_S / 5)
    return None


@pytest.mark.slow
def test_a_stalled_connection_is_seen_by_its_sender_though_heartbeats_pass() -> None:
    with Wires(3).connect() as wires:
        wires.transports[0].stall(1, 0)
        wires.transports[0].send(1, 0, header(Kind.TOKEN), None)
        wires.transports[0].send(2, 0, header(Kind.TOKEN), None)
        took_s = stands_after_s(wires, 0, 1, 20.0)
        assert took_s is not None
        assert took_s >= DETECT_S
        assert not wires.transports[0].flows()[2, 0].outstanding
        wires.handlers[1].heard_from.clear()
        heartbeat(wires, 0, 1, 0)
        wires.until(lambda: wires.handlers[1].heard_from == [(0, 0)], "the heartbeat")


@pytest.mark.slow
def test_both_directions_stand_still_and_go_on_in_order_when_it_ends() -> None:
    with Wires(2).connect() as wires:
        for server in (0, 1):
            wires.transports[server].stall(1 - server, 0)
            wires.transports[server].send(1 - server, 0, header(Kind.TOKEN, step=1), None)
        assert stands_after_s(wires, 1, 0, 20.0) is not None
        assert not wires.handlers[0].frames
        assert not wires.handlers[1].frames
        for server in (0, 1):
            wires.transports[server].unstall(1 - server, 0)
            wires.transports[server].send(1 - server, 0, header(Kind.TOKEN, step=2), None)
        wires.until(lambda: all(len(each.frames) == 2 for each in wires.handlers), "what was held back")
        assert [frame.step for _, _, frame in wires.handlers[0].frames] == [1, 2]
        assert not wires.handlers[0].losses


@pytest.mark.serial("a paced connection has a rate")
def test_a_paced_connection_carries_its_rate_and_no_more_until_it_ends() -> None:
    """With 2 MB a second 800 kB take 0.4 s; the kernel paces no connection that has just begun."""
    with Wires(2, nbytes=800_000).connect() as wires:

        def took_s(step: int) -> float:
            began_s, n_frames = time.monotonic(), len(wires.handlers[1].frames)
            frame = header(Kind.REDUCE, 0, 800_000, step=step)
            wires.transports[0].send(1, 0, frame, memoryview(bytes(800_000)))
            wires.until(lambda: len(wires.handlers[1].frames) > n_frames, "the frame")
            return time.monotonic() - began_s

        took_s(0)
        end_slower = wires.transports[0].pace(1, 0, 2_000_000)
        end_faster = wires.transports[0].pace(1, 0, 200_000_000)
        assert took_s(1) > 0.3
        end_slower()
        assert min(took_s(2), took_s(3), took_s(4)) < 0.3
        end_faster()
        assert min(took_s(5), took_s(6), took_s(7)) < 0.3
        assert not wires.handlers[0].losses


@pytest.mark.slow
def test_a_reader_that_does_not_read_is_no_stall() -> None:
    """Back-pressure: the peer's window is closed for as long as it likes, and its kernel answers probes."""
    with Wires(2).connect() as wires:
        wires.handlers[1].verdict = lambda header: WAIT
        payload = memoryview(bytes(MUCH_NBYTES))
        frame = header(Kind.REDUCE, 0, MUCH_NBYTES)._replace(nbytes=MUCH_NBYTES)
        wires.transports[0].send(1, 0, frame, payload)
        assert stands_after_s(wires, 0, 1, 4 * DETECT_S) is None
        assert wires.transports[0].flows()[1, 0].outstanding


def _reads_nothing(sock: socket.socket) -> None:
    signal.pause()


@pytest.mark.slow
def test_a_peer_that_is_stopped_is_no_stall() -> None:
    """Its kernel acknowledges, or answers probes: that it is stopped is for heartbeats to say."""
    left, right = _pair()
    process = get_context("fork").Process(target=_reads_nothing, args=(right,))
    process.start()
    right.close()
    left.setblocking(False)
    with left:
        try:
            while True:
                left.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        stalls, start_s = Stalls(DETECT_S), time.monotonic()
        while (now := time.monotonic()) < start_s + 4 * DETECT_S:
            stalls.look({(1, 0): flow_of(left)}, now)
            assert not stalls.standing(now)
            time.sleep(DETECT_S / 5)
        process.kill()
        process.join()
        process.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return left, listener.accept()[0]


def test_what_the_peer_sends_is_no_answer() -> None:
    """A path that drops one direction alone: the other brings old acknowledgements again and again."""
    left, right = _pair()
    with left, right:
        before = flow_of(left)
        assert not before.outstanding
        hold(right)  # nothing of what left sends arrives, nor its acknowledgements
        left.send(b"into the void")
        for _ in range(5):
            right.send(b"from the other side")
        left.settimeout(5.0)
        assert sum(len(left.recv(19, socket.MSG_WAITALL)) for _ in range(5)) == 5 * 19
        after = flow_of(left)
        assert after.outstanding
        assert after.answers == before.answers
        release(right)
        release(right)


def test_a_dial_that_is_stalled_hangs_and_succeeds_when_it_ends() -> None:
    with Wires(2, connect_s=5.0) as wires:
        wires.transports[0].stall(1, 0)
        for server, transport in enumerate(wires.transports):
            transport.set_peers(wires.wanted(server))
        polled(wires.poller, 0.3)
        assert not wires.transports[0].is_up(1, 0)
        wires.transports[0].unstall(1, 0)
        wires.until(wires.all_up, "the link")


def test_a_dial_that_is_stalled_for_good_is_a_time_out() -> None:
    with Wires(2, connect_s=0.4) as wires:
        wires.transports[0].stall(1, 0)
        wires.transports[0].set_peers(wires.wanted(0))
        wires.until(lambda: wires.handlers[0].losses, "the loss")
        assert wires.handlers[0].losses[0][:3] == (1, 0, "timeout")


@pytest.mark.parametrize("prober", [0, 1])
def test_a_probe_proves_a_path_that_carries_data_and_no_other(prober: int) -> None:
    other = 1 - prober
    with Wires(2) as wires:
        endpoint = wires.transports[other].endpoints[0]
        wires.transports[prober].stall(other, 0)
        wires.transports[prober].probe(other, 0, endpoint)
        polled(wires.poller, 0.3)
        assert not wires.handlers[prober].proofs
        wires.transports[prober].unstall(other, 0)
        wires.transports[prober].probe(other, 0, endpoint)
        wires.until(lambda: wires.handlers[prober].proofs == [(other, 0)], "the proof")
        assert not wires.handlers[other].proofs, "each proves for itself"


def test_a_probe_fails_where_the_other_end_alone_is_stalled() -> None:
    with Wires(2) as wires:
        wires.transports[1].stall(0, 0)
        wires.transports[0].probe(1, 0, wires.transports[1].endpoints[0])
        polled(wires.poller, 0.3)
        assert not wires.handlers[0].proofs


def test_no_probe_over_a_silent_nic_and_none_is_left_open() -> None:
    with Wires(2) as wires:
        wires.transports[1].silence(0)
        wires.transports[0].probe(1, 0, wires.transports[1].endpoints[0])
        wires.transports[1].probe(0, 0, wires.transports[0].endpoints[0])
        polled(wires.poller, 0.2)
        wires.transports[0].silence(0)
        wires.transports[1].unsilence(0)
        polled(wires.poller, 0.1)
        assert not any(handler.proofs for handler in wires.handlers)


def test_a_probe_leaves_the_connections_alone() -> None:
    with Wires(2).connect() as wires:
        for server in (0, 1):
            wires.transports[server].probe(1 - server, 0, wires.transports[1 - server].endpoints[0])
        wires.until(lambda: all(handler.proofs for handler in wires.handlers), "both proofs")
        assert wires.all_up()
        assert not any(handler.losses for handler in wires.handlers)


def test_a_flow_says_what_is_acknowledged() -> None:
    left, right = _pair()
    with left, right:
        left.send(bytes(1000))
        deadline_s = time.monotonic() + 30.0
        while (flow := flow_of(left)).outstanding and time.monotonic() < deadline_s:
            pass
        assert flow == Flow(outstanding=False, answers=flow.answers, tries=0)
        assert flow.answers > 1000
