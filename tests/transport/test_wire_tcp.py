"""Real connections on loopback: payloads in place, priorities, exact bytes, fences, each bound to its NIC."""

import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from descriptors import opened
from wires import JOB, TOKEN, Recorder, Wires, header, heartbeat, nic, polled, until

from bml.protocol.wire.frame import HEADER_NBYTES
from bml.topology.errors import FabricError, InvariantError, UsageError
from bml.transport import DROP, WAIT, Header, Kind, Poller, TcpTransport, Transport
from bml.transport.handshake.auth import Identity


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = opened()
    yield
    assert opened() <= before


def test_every_connection_is_bound_to_its_nic() -> None:
    with Wires(3, 2) as wires:
        wires.connect()
        for server, transport in enumerate(wires.transports):
            assert [host for host, _ in transport.endpoints] == [nic(server, 0), nic(server, 1)]
        pairs = established(wires)
        # Each connection is seen from both of its ends.
        assert len(pairs) == 2 * 3 * 2
        for local, remote in pairs:
            level = local.split(".")[2]
            assert remote.split(".")[2] == level
            assert local != remote
        assert {local for local, _ in pairs} == {nic(s, level) for s in range(3) for level in range(2)}


def established(wires: Wires) -> list[tuple[str, str]]:
    """(local, remote) address of every open data connection of this process."""
    pairs = []
    for transport in wires.transports:
        for link in transport._links.values():
            assert link.connection is not None
            sock = link.connection._sock
            assert sock is not None
            pairs.append((sock.getsockname()[0], sock.getpeername()[0]))
    return pairs


def test_udp_and_tcp_share_the_port_number() -> None:
    with Wires(1, 2) as wires:
        for host, port in wires.transports[0].endpoints:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                with socket.socket(socket.AF_INET, kind) as taken, pytest.raises(OSError, match="in use"):
                    taken.bind((host, port))


def test_many_random_slices_land_in_place_and_by_priority() -> None:
    rng = random.Random(4)
    cuts = sorted(rng.sample(range(1, 2_000_000), 400))
    data = rng.randbytes(2_000_000)
    ranges = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
    rng.shuffle(ranges)
    with Wires(2, 1, nbytes=len(data)) as wires:
        wires.connect()
        priorities = [rng.randrange(8) for _ in ranges]
        for (start, stop), priority in zip(ranges, priorities, strict=True):
            wires.transports[0].send(1, 0, header(0, start, stop), memoryview(data)[start:stop], priority)
        receiver = wires.handlers[1]
        wires.until(lambda: len(receiver.frames) == len(ranges), "all slices")
        assert receiver.memory == data
        expected = sorted(range(len(ranges)), key=lambda i: priorities[i])
        got = [(frame.start, frame.stop) for _, _, frame in receiver.frames]
        assert got == [ranges[i] for i in expected]
        stats = wires.transports[0].stats()[1, 0]
        assert stats.frames_sent == len(ranges)
        assert stats.nbytes_sent == len(data) + len(ranges) * HEADER_NBYTES
        assert (stats.frames_queued, stats.nbytes_queued) == (0, 0)
        other = wires.transports[1].stats()[0, 0]
        assert (other.frames_received, other.nbytes_received) == (stats.frames_sent, stats.nbytes_sent)


def test_urgent_frames_overtake_what_waits_but_not_what_is_under_way() -> None:
    data = bytes(4 << 20)
    with Wires(2, 1, nbytes=len(data)) as wires:
        wires.connect()
        wires.handlers[1].verdict = lambda h: DROP if h.kind == Kind.REDUCE else memoryview(bytearray())
        for _ in range(8):
            wires.transports[0].send(1, 0, header(0, 0, len(data)), memoryview(data), 5)
        sent = wires.transports[0].stats
        wires.until(lambda: sent()[1, 0].nbytes_sent, "the first bytes")
        wires.transports[0].send(1, 0, header(Kind.TOKEN, 3), None, 0)
        wires.until(lambda: wires.handlers[1].frames, "the token")
        assert len(wires.handlers[1].admitted) <= 3


def test_a_long_frame_for_an_idle_wire_does_not_wait_for_the_end_of_the_pass() -> None:
    data = memoryview(bytes(1 << 20))
    with Wires(2, 1, nbytes=1 << 20) as wires:
        wires.connect()
        sender = wires.transports[0]
        sender.send(1, 0, header(0, 0, 1 << 10), data[: 1 << 10])
        assert sender.stats()[1, 0].nbytes_sent == 0, "short frames are gathered"
        wires.until(lambda: wires.handlers[1].frames, "the short frame")
        sender.send(1, 0, header(0, 0, 1 << 20), data)
        assert sender.stats()[1, 0].nbytes_sent > 1 << 10
        sender.send(1, 0, header(0, 0, 1 << 20), data)
        wires.until(lambda: len(wires.handlers[1].frames) == 3, "both long frames")


def test_a_broken_connection_is_reported_by_the_poller_and_not_from_within_send() -> None:
    """Whoever sends is in the middle of something and must not be called back."""
    data = memoryview(bytes(1 << 20))
    with Wires(2, 1, nbytes=1 << 20) as wires:
        wires.connect()
        wires.transports[1].send(0, 0, header(0, 0, 8), data[:8])  # never read by 0: closing resets
        wires.transports[0].send(1, 0, header(0, 0, 8), data[:8])
        wires.poller.poll(0)
        wires.transports[1].close()
        for _ in range(3):
            wires.transports[0].send(1, 0, header(0, 0, 1 << 20), data)
        assert wires.handlers[0].losses == []
        wires.until(lambda: wires.handlers[0].losses, "the loss")
        assert wires.handlers[0].losses[0][2] in ("reset", "eof")
        assert len(wires.handlers[0].losses) == 1


def test_big_payloads_both_ways_at_once_are_byte_exact() -> None:
    nbytes = 8 << 20
    rng = random.Random(1)
    data = [rng.randbytes(nbytes) for _ in range(2)]
    with Wires(2, 1, nbytes=nbytes) as wires:
        wires.connect()
        for me in range(2):
            wires.transports[me].send(1 - me, 0, header(0, 0, nbytes), memoryview(data[me]))
        wires.until(lambda: all(h.frames for h in wires.handlers), "both payloads")
        assert wires.handlers[0].memory == data[1]
        assert wires.handlers[1].memory == data[0]
        assert all(t.queued_nbytes == 0 for t in wires.transports)


def test_frames_queued_before_the_link_is_up_wait_for_it() -> None:
    with Wires(2, 1, nbytes=4) as wires:
        one, other = wires.transports
        other.set_peers({(0, 0): one.endpoints[0]})
        other.send(0, 0, header(0, 0, 4), memoryview(b"abcd"))
        assert other.queued_nbytes == 4 + HEADER_NBYTES
        one.set_peers({(1, 0): other.endpoints[0]})
        wires.until(lambda: wires.handlers[0].frames, "the frame")
        assert wires.handlers[0].memory == b"abcd"


def test_arrays_of_any_item_size_are_sent_as_bytes() -> None:
    floats = memoryview(bytearray(range(64))).cast("f")
    with Wires(2, 1, nbytes=64) as wires:
        wires.connect()
        wires.transports[0].send(1, 0, Header(0, 1, 1, 0, 1, 7, 0, 16, 64), floats)
        wires.until(lambda: wires.handlers[1].frames, "the frame")
        assert wires.handlers[1].memory == bytes(range(64))


def test_wait_stops_one_connection_and_resume_goes_on() -> None:
    with Wires(3, 1, nbytes=100) as wires:
        wires.connect()
        receiver = wires.handlers[2]
        usual = receiver.verdict
        receiver.verdict = lambda h: WAIT if h.origin == 0 else DROP
        data = bytes(range(100))
        for i in range(10):
            wires.transports[0].send(
                2, 0, header(0, 10 * i, 10 * i + 10), memoryview(data)[10 * i : 10 * i + 10]
            )
        wires.until(lambda: receiver.admitted, "the first header")
        wires.transports[1].send(2, 0, header()._replace(origin=1, start=1, stop=1), None)
        wires.until(lambda: len(receiver.admitted) == 2, "the header on the other connection")
        wires.transports[2].resume()
        wires.until(lambda: len(receiver.admitted) == 3, "the same header again")
        assert receiver.admitted[2] == receiver.admitted[0]
        receiver.verdict = usual
        wires.transports[2].resume()
        wires.until(lambda: len(receiver.frames) == 10, "all ten")
        assert receiver.memory == data
        assert receiver.losses == []


def test_fence_in_mid_frame() -> None:
    nbytes = 4 << 20
    with Wires(2, 1, nbytes=nbytes) as wires:
        wires.connect()
        sender, receiver = wires.transports
        old = bytearray(b"o" * nbytes)
        for i in range(3):
            sender.send(1, 0, header(0, 0, nbytes, step=i), memoryview(old))
        got = receiver.stats
        wires.until(lambda: got()[0, 0].nbytes_received > HEADER_NBYTES, "a part of the first payload")
        assert not wires.handlers[1].frames
        sender.fence()
        receiver.fence()
        assert 0 < sender.queued_nbytes < nbytes
        before = bytes(wires.handlers[1].memory)
        old[:] = b"x" * nbytes
        old += b"the buffer is free: nobody exports it any more"
        new = random.Random(0).randbytes(1000)
        wires.handlers[1].memory[:1000] = bytes(1000)
        sender.send(1, 0, header(Kind.BROADCAST, 0, 1000, step=9, epoch=2), memoryview(new))
        wires.until(lambda: wires.handlers[1].frames, "the frame of the new epoch")
        assert [frame.step for _, _, frame in wires.handlers[1].frames] == [9]
        assert [frame.step for frame in wires.handlers[1].admitted] == [0, 9]
        assert wires.handlers[1].memory == new + before[1000:]


def test_fence_drops_what_was_never_started_even_before_the_link_is_up() -> None:
    with Wires(2, 1, nbytes=8) as wires:
        one, other = wires.transports
        one.set_peers({(1, 0): other.endpoints[0]})
        one.send(1, 0, header(0, 0, 4), memoryview(b"old!"))
        one.fence()
        assert one.queued_nbytes == 0
        one.send(1, 0, header(0, 4, 8), memoryview(b"new!"))
        other.set_peers({(0, 0): one.endpoints[0]})
        wires.until(lambda: wires.handlers[1].frames, "the frame")
        assert wires.handlers[1].memory == b"\0\0\0\0new!"


def test_a_waiting_header_survives_the_fence_and_is_asked_again() -> None:
    with Wires(2, 1, nbytes=8) as wires:
        wires.connect()
        receiver = wires.handlers[1]
        receiver.verdict = lambda h: WAIT
        wires.transports[0].send(1, 0, header(0, 0, 8), memoryview(b"tomorrow"))
        wires.until(lambda: receiver.admitted, "the header")
        wires.transports[1].fence()
        receiver.verdict = None
        wires.transports[1].resume()
        wires.until(lambda: receiver.frames, "the frame")
        assert receiver.memory == b"tomorrow"


def test_handler_may_fence_and_close_from_inside() -> None:
    with Wires(2, 1, nbytes=8) as wires:
        wires.connect()
        wires.handlers[1].on_received = lambda peer, level, h: (
            wires.transports[1].fence(),
            wires.transports[1].close(),
        )
        for _ in range(5):
            wires.transports[0].send(1, 0, header(0, 0, 8), memoryview(b"12345678"))
        wires.until(lambda: wires.handlers[0].losses, "the sender sees the end")
        assert len(wires.handlers[1].frames) == 1
        assert wires.handlers[1].losses == []


def test_links_that_are_not_wanted_any_more_close_without_lost() -> None:
    with Wires(2, 2) as wires:
        wires.connect()
        one, other = wires.transports
        one.set_peers({(1, 1): other.endpoints[1]})
        wires.until(lambda: wires.handlers[1].losses, "the other side sees the end")
        assert [loss[:3] for loss in wires.handlers[1].losses] == [(0, 0, "eof")]
        assert f"server 1 NIC 0 ({nic(1, 0)})" in wires.handlers[1].losses[0][3]
        assert wires.handlers[0].losses == []
        with pytest.raises(InvariantError, match="not wanted"):
            one.send(1, 0, header(Kind.TOKEN), None)
        other.send(0, 0, header(Kind.TOKEN), None)  # its loss was reported: dropped
        # And again: the same call with the link still wanted reconnects.
        one.set_peers(wires.wanted(0))
        other.set_peers(wires.wanted(1))
        wires.until(wires.all_up, "up again")
        other.send(0, 0, header(Kind.TOKEN), None)
        wires.until(lambda: wires.handlers[0].frames, "a token over the new connection")


def test_a_connection_from_a_peer_that_is_ahead_is_kept() -> None:
    with Wires(2, 1, nbytes=4) as wires:
        one, other = wires.transports
        one.set_peers({(1, 0): other.endpoints[0]})
        one.send(1, 0, header(0, 0, 4), memoryview(b"abcd"))
        wires.until(lambda: one.is_up(1, 0) and one.queued_nbytes == 0, "the dialer is through")
        assert not other.is_up(0, 0)
        other.set_peers({(0, 0): one.endpoints[0]})
        assert other.is_up(0, 0)
        wires.until(lambda: wires.handlers[1].frames, "the frame")
        assert wires.handlers[1].memory == b"abcd"


def test_a_kept_connection_whose_peer_went_away_is_not_used() -> None:
    with Wires(2, 1) as wires:
        one, other = wires.transports
        one.set_peers({(1, 0): other.endpoints[0]})
        wires.until(lambda: one.is_up(1, 0), "the dialer is through")
        one.set_peers({})
        wires.until(lambda: not other._parking._sockets, "the kept connection is gone")
        wires.connect()
        assert wires.handlers[1].losses == []


def test_a_second_connection_replaces_the_first() -> None:
    with Wires(2, 1, nbytes=4) as wires:
        wires.connect()
        other = wires.transports[1]
        # Server 0 comes back as another process would, while server 1 still believes in the first one.
        again = wires.make(0, Recorder())
        other.send(0, 0, header(Kind.TOKEN), None)
        wires.until(lambda: wires.handlers[0].frames, "the first connection was used")
        again.set_peers({(1, 0): other.endpoints[0]})
        wires.until(lambda: wires.handlers[1].losses, "the first connection is reported")
        assert wires.handlers[1].losses[0][2] == "reset"
        other.set_peers({(0, 0): again.endpoints[0]})
        assert other.is_up(0, 0)
        again.send(1, 0, header(0, 0, 4), memoryview(b"abcd"))
        wires.until(lambda: wires.handlers[1].frames, "a frame over the second connection")
        assert len(wires.handlers[1].losses) == 1
        again.close()


def test_an_untouched_connection_is_replaced_without_a_word() -> None:
    with Wires(2, 1) as wires:
        wires.connect()
        again = wires.make(0, Recorder())
        again.set_peers({(1, 0): wires.transports[1].endpoints[0]})
        wires.until(lambda: wires.handlers[0].losses, "the first connection is closed")
        wires.transports[1].send(0, 0, header(Kind.TOKEN), None)
        wires.until(lambda: again._handler.frames, "a token over the second connection")
        assert wires.handlers[1].losses == []
        again.close()


def test_a_peer_that_never_comes_is_lost_at_the_deadline_once() -> None:
    with Wires(2, 1, connect_s=0.3) as wires:
        one, other = wires.transports
        with socket.create_server((nic(8, 0), 0)) as free:
            nowhere = free.getsockname()
        one.set_peers({(1, 0): nowhere})
        other.set_peers({(0, 0): one.endpoints[0]})
        wires.until(lambda: wires.handlers[0].losses and wires.handlers[1].losses, "both give up")
        assert [loss[:3] for loss in wires.handlers[0].losses] == [(1, 0, "refused")]
        assert [loss[:3] for loss in wires.handlers[1].losses] == [(0, 0, "timeout")]
        assert "not connected within 0.3 s" in wires.handlers[0].losses[0][3]
        polled(wires.poller, 0.4)
        assert len(wires.handlers[0].losses) == len(wires.handlers[1].losses) == 1


def test_a_listener_that_comes_late_is_found() -> None:
    with Wires(2, 1) as wires, socket.socket() as late:
        late.bind((nic(8, 0), 0))
        wires.transports[0].set_peers({(1, 0): late.getsockname()})
        polled(wires.poller, 0.05)
        late.listen()
        late.setblocking(False)
        accepted = []

        def try_accept() -> bool:
            with contextlib.suppress(BlockingIOError):
                accepted.append(late.accept()[0])
            return bool(accepted)

        wires.until(try_accept, "a later attempt")
        accepted[0].close()


def test_heartbeats_are_heard_and_bytes_too() -> None:
    with Wires(2, 2) as wires:
        wires.connect()
        one, other = wires.transports
        heartbeat(wires, 0, 1, 1)
        wires.until(lambda: wires.handlers[1].heard_from, "the heartbeat")
        assert wires.handlers[1].heard_from == [(0, 1)]
        one.send(1, 0, header(Kind.TOKEN), None)
        wires.until(lambda: wires.handlers[1].frames, "the token")
        assert wires.handlers[1].heard_from == [(0, 1), (0, 0)]
        other.set_peers({})
        heartbeat(wires, 0, 1, 1)
        wires.until(
            lambda: len(wires.handlers[1].heard_from) > 2, "a heartbeat where no connection is wanted"
        )
        wires.until(lambda: wires.handlers[0].losses, "the other side closed")


def test_many_links_share_a_pass() -> None:
    """A link with endless bulk does not keep another link's token waiting."""
    nbytes = 32 << 20
    data = memoryview(bytes(nbytes))
    with Wires(3, 1) as wires:
        wires.connect()
        wires.handlers[2].verdict = lambda h: DROP if h.nbytes else memoryview(bytearray())
        for _ in range(4):
            wires.transports[0].send(2, 0, header(0, 0, nbytes), data)
        wires.transports[1].send(2, 0, header(Kind.TOKEN), None)
        wires.until(lambda: wires.handlers[2].frames, "the token")
        assert wires.transports[2].stats()[0, 0].nbytes_received < nbytes


def test_beside_a_computation_more_is_written_at_once() -> None:
    """Of links that were open before, and of those that are opened then."""
    nbytes = 4 << 20
    data = memoryview(bytes(nbytes))
    with Wires(3, 1, nbytes=nbytes) as wires:
        sender = wires.transports[0]

        def written_at_once(peer: int) -> int:
            before = len(wires.handlers[peer].frames)
            sender.send(peer, 0, header(0, 0, nbytes), data)
            waiting = sender.queued_nbytes
            wires.until(lambda: len(wires.handlers[peer].frames) > before, "the frame")
            return nbytes - waiting

        wires.connect()
        alone = written_at_once(1)
        sender.beside_computation(True)
        beside = written_at_once(1)
        assert beside > 2 * alone
        for server, peer in ((0, 2), (2, 0)):
            wanted = wires.wanted(server)
            wires.transports[server].set_peers({key: wanted[key] for key in wanted if key[0] != peer})
        wires.connect()
        assert written_at_once(2) > 2 * alone
        sender.beside_computation(False)
        assert written_at_once(1) < beside / 2
        assert written_at_once(2) < beside / 2


def test_bad_arguments_say_what_is_wrong() -> None:
    poller = Poller()
    with pytest.raises(FabricError, match=r"server 0 NIC 1 \(192\.0\.2\.1\)"):
        TcpTransport(Identity.of(TOKEN, JOB, 0), ["127.0.0.1", "192.0.2.1"], poller, Recorder())
    with pytest.raises(UsageError, match="numeric"):
        TcpTransport(Identity.of(TOKEN, JOB, 0), ["localhost"], poller, Recorder())
    with pytest.raises(UsageError, match="token"):
        Identity.of(b"", JOB, 0)
    poller.close()
    with Wires(2, 1) as wires:
        transport: Transport = wires.transports[0]
        with pytest.raises(UsageError, match="has NICs 0 to 0, not 1"):
            transport.set_peers({(1, 1): ("127.0.0.1", 5)})
        with pytest.raises(UsageError, match="cannot want server 0"):
            transport.set_peers({(0, 0): ("127.0.0.1", 5)})
        with pytest.raises(InvariantError, match="never wanted"):
            transport.send(1, 0, header(Kind.TOKEN), None)
        wires.connect()
        with pytest.raises(InvariantError, match="does not fit"):
            transport.send(1, 0, header(0, 0, 4), memoryview(b"abc"))
        with pytest.raises(UsageError, match="has NICs"):
            transport.silence(4)


def test_close_is_idempotent_with_everything_under_way() -> None:
    with Wires(3, 2, nbytes=1 << 20) as wires:
        data = memoryview(bytes(1 << 20))
        wires.connect()
        for _ in range(4):
            wires.transports[0].send(1, 0, header(0, 0, 1 << 20), data)
            wires.poller.poll(0)
        wires.transports[2].set_peers({})
        wires.transports[1].silence(1)
        with socket.create_connection(wires.transports[0].endpoints[0]):
            wires.poller.poll(0.01)
            for transport in wires.transports:
                transport.close()
                transport.close()
        wires.transports[0].set_peers({(1, 0): ("127.0.0.1", 9)})
        wires.poller.poll(0)


@pytest.mark.real
@pytest.mark.parametrize("paused", [False, True])
def test_a_killed_peer_is_lost_once_and_at_once(paused: bool) -> None:
    poller = Poller()
    handler = Recorder(64 << 10)
    if paused:
        handler.verdict = lambda h: WAIT
    transport = TcpTransport(Identity.of(TOKEN, JOB, 0), [nic(0, 0)], poller, handler)
    command = [sys.executable, str(Path(__file__).with_name("peer.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            host, port = child.stdout.readline().split()
            child.stdin.write("{} {}\n".format(*transport.endpoints[0]))
            child.stdin.flush()
            transport.set_peers({(1, 0): (host, int(port))})
            until(poller, lambda: len(handler.admitted) >= (1 if paused else 50), "traffic")
        finally:
            child.kill()
        until(poller, lambda: handler.losses, "the loss")
        assert handler.losses[0][:2] == (1, 0)
        assert handler.losses[0][2] in ("reset", "eof")
        assert not transport.is_up(1, 0)
        polled(poller, 0.02)
        assert len(handler.losses) == 1
    transport.close()
    poller.close()
