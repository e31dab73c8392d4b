"""Silent NICs, which only a detector can notice, and strangers, which are refused and disturb no server."""

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest
from descriptors import opened
from wires import JOB, TOKEN, Wires, header, heartbeat, nic, polled, read_all

from bml.io.sendqueue import Counters, SendQueue
from bml.protocol.wire.frame import pack
from bml.transport import Kind
from bml.transport.handshake.auth import DialerHandshake, Hello, Role
from bml.transport.handshake.sealing import Heartbeat, seal_heartbeat


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = opened()
    yield
    assert opened() <= before


def test_a_silent_nic_says_nothing_and_hears_nothing() -> None:
    with Wires(2, 2, nbytes=1 << 20) as wires:
        wires.connect()
        silent, other = wires.transports
        silent.silence(0)
        data = memoryview(bytes(1 << 20))
        for me, peer in ((0, 1), (1, 0)):
            heartbeat(wires, me, peer, 0)
            wires.transports[me].send(peer, 0, header(0, 0, 1 << 20), data)
        # The other NIC of both works as before.
        for me, peer in ((0, 1), (1, 0)):
            heartbeat(wires, me, peer, 1)
            wires.transports[me].send(peer, 1, header(Kind.TOKEN), None)
        wires.until(lambda: all(h.frames and len(h.heard_from) >= 2 for h in wires.handlers), "the other NIC")
        polled(wires.poller, 0.05)
        for handler in wires.handlers:
            assert {level for _, level in handler.heard_from} == {1}
            assert {level for _, level, _ in handler.frames} == {1}
            assert handler.losses == []
        assert silent.queued_nbytes == 0
        assert other.queued_nbytes > 0
        assert silent.is_up(1, 0)
        assert other.is_up(0, 0)


def test_a_nic_that_stands_still_loses_nothing_and_catches_up() -> None:
    with Wires(2).connect() as wires:
        first, second = wires.transports
        first.stand_still(0)
        for step in (1, 2):
            first.send(1, 0, header(Kind.TOKEN, step=step), None)
            second.send(0, 0, header(Kind.TOKEN, step=step), None)
            heartbeat(wires, 0, 1, 0)
            heartbeat(wires, 1, 0, 0)
        polled(wires.poller, 0.2)
        assert not any(each.frames or each.heard_from for each in wires.handlers)
        first.go_on(0)
        first.go_on(0)
        wires.until(lambda: all(len(each.frames) == 2 for each in wires.handlers), "the frames")
        assert [frame.step for _, _, frame in wires.handlers[1].frames] == [1, 2]
        wires.until(lambda: all(len(each.heard_from) >= 2 for each in wires.handlers), "the heartbeats")
        assert not any(each.losses for each in wires.handlers)


def test_a_silent_nic_that_stood_still_stays_silent() -> None:
    with Wires(2).connect() as wires:
        first, second = wires.transports
        first.stand_still(0)
        heartbeat(wires, 0, 1, 0)
        first.silence(0)
        first.go_on(0)
        heartbeat(wires, 1, 0, 0)
        second.send(0, 0, header(Kind.TOKEN), None)
        polled(wires.poller, 0.2)
        assert not any(each.frames or each.heard_from for each in wires.handlers)
        first.unsilence(0)
        wires.until(lambda: wires.handlers[0].frames, "the frame")
        heartbeat(wires, 1, 0, 0)
        wires.until(lambda: wires.handlers[0].heard_from, "a heartbeat")


def test_no_end_of_file_from_a_silent_nic_until_it_speaks_again() -> None:
    with Wires(2, 1) as wires:
        wires.connect()
        silent, _ = wires.transports
        silent.silence(0)
        silent.set_peers({})
        polled(wires.poller, 0.05)
        assert wires.handlers[1].losses == []
        silent.unsilence(0)
        wires.until(lambda: wires.handlers[1].losses, "the end is seen now")
        assert wires.handlers[1].losses[0][2] == "eof"


def test_the_death_of_a_peer_is_not_noticed_through_a_silent_nic() -> None:
    with Wires(2, 1) as wires:
        wires.connect()
        wires.transports[0].silence(0)
        wires.transports[1].close()
        polled(wires.poller, 0.05)
        assert wires.handlers[0].losses == []
        wires.transports[0].unsilence(0)
        wires.until(lambda: wires.handlers[0].losses, "the loss")


@pytest.mark.parametrize("silent", [0, 1])
def test_no_server_connects_over_a_silent_nic(silent: int) -> None:
    with Wires(2, 1, connect_s=0.3) as wires:
        wires.transports[silent].silence(0)
        for server, transport in enumerate(wires.transports):
            transport.set_peers(wires.wanted(server))
        wires.until(lambda: all(h.losses for h in wires.handlers), "both give up")
        assert [h.losses[0][2] for h in wires.handlers] == ["timeout", "timeout"]
        wires.transports[silent].unsilence(0)
        wires.connect()


def test_silence_in_the_middle_of_connecting() -> None:
    with Wires(2, 1, connect_s=0.3) as wires:
        for server, transport in enumerate(wires.transports):
            transport.set_peers(wires.wanted(server))
        for transport in wires.transports:
            transport.silence(0)
        wires.until(lambda: all(h.losses for h in wires.handlers), "both give up")
        assert not any(h.heard_from for h in wires.handlers)


def test_a_healed_nic_goes_on_in_mid_stream() -> None:
    nbytes = 4 << 20
    with Wires(2, 1, nbytes=nbytes) as wires:
        wires.connect()
        one, other = wires.transports
        data = random.Random(5).randbytes(nbytes)
        one.send(1, 0, header(0, 0, nbytes), memoryview(data))
        wires.until(lambda: other.stats()[0, 0].nbytes_received, "a part")
        one.silence(0)
        other.silence(0)
        one.send(1, 0, header(Kind.TOKEN, 1), None)  # leaves when the NIC works again
        polled(wires.poller, 0.02)
        assert not wires.handlers[1].frames
        one.unsilence(0)
        other.unsilence(0)
        one.send(1, 0, header(Kind.TOKEN, 2), None)
        wires.until(lambda: len(wires.handlers[1].frames) == 3, "the rest, and the tokens after it")
        assert wires.handlers[1].memory == data
        assert [frame[2].start for frame in wires.handlers[1].frames[1:]] == [1, 2], "nothing was lost"


STRANGERS = {
    "wrong token": {"token": b"wrong"},
    "wrong job": {"job": "another job"},
}


@pytest.mark.parametrize("difference", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_shown_out(difference: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    with Wires(3, 1, connect_s=0.3) as wires:
        stranger = wires.make(0, wires.handlers[0], **{"connect_s": 0.3, **difference})
        wires.transports[0].close()
        wires.transports[0] = stranger
        for server in (1, 2):
            wires.transports[server].set_peers(wires.wanted(server))
        stranger.set_peers(wires.wanted(0))
        wires.until(lambda: all(h.losses for h in wires.handlers), "no server accepts the stranger")
        assert wires.handlers[0].losses[0][2] == "refused"
        assert "refused by the other side: wrong" in wires.handlers[0].losses[0][3]
        assert "closed a connection" in caplog.text
        assert_still_works(wires, 1, 2)
        before = list(wires.handlers[1].heard_from)
        stranger.heartbeat(1, 0, wires.transports[1].endpoints[0])
        wires.until(lambda: wires.transports[1].nics[0].heartbeats.rejected, "the stranger's heartbeat")
        assert wires.handlers[1].heard_from == before


def assert_still_works(wires: Wires, one: int, other: int) -> None:
    count = len(wires.handlers[other].frames)
    wires.transports[one].send(other, 0, header(Kind.TOKEN), None)
    wires.until(lambda: len(wires.handlers[other].frames) > count, "the others go on")


def test_garbage_on_the_port_is_closed() -> None:
    rng = random.Random(11)
    with Wires(2, 1) as wires:
        wires.connect()
        for i in range(40):
            with socket.create_connection(wires.transports[1].endpoints[0]) as sock:
                sock.setblocking(False)
                garbage = rng.randbytes(rng.randrange(1, 3000))
                with contextlib.suppress(ConnectionError):
                    sock.sendall((b"BMLh" if i % 2 else b"") + garbage + bytes(200))
                read_all(sock, wires.poller)
        assert_still_works(wires, 0, 1)
        assert wires.handlers[0].losses == wires.handlers[1].losses == []


def at_end(sock: socket.socket) -> bool:
    """Whether the other side closed; throws away what it said before."""
    try:
        return not sock.recv(4096) or at_end(sock)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
def test_slow_loris_is_closed_in_time_and_does_not_lock_others_out() -> None:
    with Wires(2, 1) as wires, contextlib.ExitStack() as sockets:
        listener = wires.transports[1].nics[0].listener

        def slow(number: int) -> list[socket.socket]:
            target = wires.transports[1].endpoints[0]
            come = [sockets.enter_context(socket.create_connection(target)) for _ in range(number)]
            for sock in come:
                sock.setblocking(False)
            return come

        loris = slow(100)
        wires.until(lambda: len(listener._pending) == 64, "as many as may be")
        wires.connect()
        listener._timeout_s = 0.2  # only now: on a busy machine the first would end before the last come
        loris += slow(10)
        wires.until(lambda: all(map(at_end, loris)), "all of them are closed")
        assert_still_works(wires, 0, 1)


def test_a_flood_from_one_address_closes_no_handshake_of_another() -> None:
    with Wires(2, 1) as wires, contextlib.ExitStack() as sockets:
        target = wires.transports[1].endpoints[0]
        pending = wires.transports[1].nics[0].listener._pending

        def come(address: str) -> socket.socket:
            return sockets.enter_context(socket.create_connection(target, source_address=(address, 0)))

        slow = come(nic(0, 0))
        wires.until(lambda: len(pending) == 1, "the first comes")
        dialer = DialerHandshake(TOKEN, Hello(Role.DATA, JOB.encode(), 0, 0), bytes(32), 1)
        dialer.start(slow.getsockname(), target)
        answer = dialer.feed(slow.recv(dialer.wants_nbytes))
        flood = [come(nic(9, 0)) for _ in range(100)]
        for sock in flood:
            sock.setblocking(False)
        wires.until(lambda: sum(map(at_end, flood)) >= 37, "there are too many")
        slow.sendall(answer)
        wires.until(lambda: wires.transports[1]._parking._sockets, "who came first, and was slow")
        assert len(pending) == 63


def test_bad_datagrams_are_ignored() -> None:
    rng = random.Random(12)
    with Wires(2, 1) as wires, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        wires.connect()
        target = wires.transports[1].endpoints[0]
        heartbeats = wires.transports[1].nics[0].heartbeats
        sock.bind((nic(0, 0), 0))
        for server in (0, 7):
            heartbeats.expect(server, sock.getsockname(), 0)

        def say(*datagrams: bytes) -> None:
            for datagram in datagrams:
                sock.sendto(datagram, target)

        job = JOB.encode()
        good = seal_heartbeat(TOKEN, job, Heartbeat(0, 1, 0, 10))
        say(good)
        wires.until(lambda: wires.handlers[1].heard_from == [(0, 0)], "a good heartbeat")
        bad = [rng.randbytes(rng.randrange(1500)) for _ in range(50)]
        bad += [good, seal_heartbeat(TOKEN, job, Heartbeat(0, 1, 0, 9))]  # replayed, and older
        bad += [
            seal_heartbeat(TOKEN, job, Heartbeat(0, 2, 0, 11)),
            seal_heartbeat(TOKEN, job, Heartbeat(0, 1, 1, 11)),
        ]
        say(*bad)
        wires.until(lambda: heartbeats.rejected == len(bad), "all are rejected")
        assert len(wires.handlers[1].heard_from) == 1
        # A server of the job without a wanted link is heard too: so a healed cable is noticed.
        say(
            seal_heartbeat(TOKEN, job, Heartbeat(7, 1, 0, 1)),
            seal_heartbeat(TOKEN, job, Heartbeat(0, 1, 0, 11)),
        )
        wires.until(lambda: len(wires.handlers[1].heard_from) == 3, "the next good ones")
        assert wires.handlers[1].heard_from == [(0, 0), (7, 0), (0, 0)]


def test_malformed_frames_end_their_connection_only() -> None:
    with Wires(3, 1, max_nbytes=1000) as wires:
        wires.connect()
        one = wires.transports[0]
        connection = one._links[1, 0].connection
        assert connection is not None
        connection.send(0, pack(header(0, 0, 1001)), None)
        wires.until(lambda: wires.handlers[1].losses, "too long")
        assert wires.handlers[1].losses[0][:3] == (0, 0, "malformed")
        assert "at most 1000" in wires.handlers[1].losses[0][3]
        connection = one._links[2, 0].connection
        assert connection is not None
        connection.send(0, b"GET / HTTP/1.1\r\n" * 10, None)
        wires.until(lambda: wires.handlers[2].losses, "not a frame")
        assert wires.handlers[2].losses[0][2] == "malformed"
        assert_still_works(wires, 1, 2)
        wires.until(lambda: len(wires.handlers[0].losses) == 2, "the sender sees both ends")
        assert len(wires.handlers[1].losses) == len(wires.handlers[2].losses) == 1


class Dribble:
    """A socket that takes a few bytes at a time, or none."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.written = b""

    def sendmsg(self, views: list[bytes], ancillary: object, flags: int) -> int:
        whole = b"".join(views)
        nbytes = self.rng.choice([0, 1, len(whole), self.rng.randrange(len(whole) + 1)])
        if nbytes == 0:
            raise BlockingIOError
        self.written += whole[:nbytes]
        return nbytes


@pytest.mark.few(15)
@pytest.mark.parametrize("seed", range(50))
def test_send_queue_against_a_model(seed: int) -> None:
    """Whatever the kernel takes, frames come out whole, by priority, and counted."""
    rng = random.Random(seed)
    counters = Counters()
    queue = SendQueue(counters)
    sock = Dribble(seed)
    expected_frames = 0
    for number in range(200):
        action = rng.random()
        if action < 0.5:
            payload = bytes([rng.randrange(1, 256)]) * rng.choice([0, 0, 3, 70_000])
            head = b"<%06d %06d>" % (number, len(payload))
            queue.push(rng.randrange(3), head, memoryview(payload) if payload else None)
            expected_frames += 1
        elif action < 0.97 and queue.nbytes:
            queue.write(sock)  # type: ignore[arg-type]
        elif action > 0.99:
            expected_frames -= len(queue)
            queue.finish_partial()
            expected_frames += len(queue)
    while queue.nbytes:
        queue.write(sock)  # type: ignore[arg-type]
    assert len(queue) == 0
    assert counters.frames_sent == expected_frames
    assert counters.nbytes_sent == len(sock.written)
    frames, rest = 0, sock.written
    while rest:
        assert rest[:1] == b"<"
        nbytes = int(rest[8:14])
        payload = rest[15 : 15 + nbytes]
        assert len(set(payload)) <= 1
        assert len(payload) == nbytes
        rest = rest[15 + nbytes :]
        frames += 1
    assert frames == expected_frames
