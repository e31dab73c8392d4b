"""Control channels: whole messages, and an end that says whether the other side is dead."""

import contextlib
import random
import socket
import struct
from collections.abc import Iterator

import pytest
from descriptors import opened
from wires import JOB, TOKEN, read_all, until

from bml.topology.errors import FabricError, UsageError
from bml.transport import COORDINATOR, Channel, ControlListener, End, Hello, Identity, Poller, Role, dial
from bml.transport.handshake.control import MAX_MESSAGE_NBYTES, MAX_QUEUED_NBYTES

HOST = "127.77.9.1"


class Desk:
    """A coordinator's end: every channel it accepted, every message that came."""

    def __init__(self, **options: object) -> None:
        self.poller = Poller()
        self.channels: dict[int, Channel] = {}
        self.messages: list[tuple[int, bytes]] = []
        self.ends: list[tuple[int, End]] = []
        self.listener = ControlListener(
            HOST,
            identity=Identity.of(TOKEN, JOB, COORDINATOR),
            poller=self.poller,
            on_connect=self.connected,
            **options,  # type: ignore[arg-type]
        )
        self.opened: list[Channel] = []
        self.failed: list[End] = []

    def connected(self, channel: Channel, hello: Hello) -> None:
        assert hello == channel.peer
        assert hello.role is Role.CONTROL
        server = hello.server
        self.channels[server] = channel
        channel.listen(
            lambda message: self.messages.append((server, message)),
            lambda end: self.ends.append((server, end)),
        )

    def dial(self, server: int = 3, token: bytes = TOKEN, job: str = JOB, **options: object) -> None:
        arguments: dict[str, object] = {"expect_server": COORDINATOR, **options}
        dial(
            *self.listener.endpoint,
            identity=Identity.of(token, job, server),
            poller=self.poller,
            on_open=self.opened.append,
            on_fail=self.failed.append,
            **arguments,  # type: ignore[arg-type]
        )

    def pair(self, server: int = 3) -> tuple[Channel, Channel]:
        """(the server's end, the coordinator's end) of a new channel."""
        count = len(self.opened)
        self.dial(server)
        self.until(lambda: len(self.opened) > count and server in self.channels, "an open channel")
        return self.opened[-1], self.channels[server]

    def until(self, condition: object, what: str) -> None:
        until(self.poller, condition, what)  # type: ignore[arg-type]

    def close(self) -> None:
        for channel in [*self.opened, *self.channels.values()]:
            channel.close()
        self.listener.close()
        self.listener.close()
        self.poller.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    before = opened()
    desk = Desk()
    yield desk
    desk.close()
    assert opened() <= before


def test_messages_both_ways_in_order(desk: Desk) -> None:
    server, coordinator = desk.pair()
    assert server.peer.server == COORDINATOR
    rng = random.Random(2)
    sizes = [0, 1, 5, 65532, 65536, 3_000_000, 0, 17]
    messages = [rng.randbytes(size) for size in sizes]
    back: list[bytes] = []
    server.listen(back.append, desk.failed.append)
    for message in messages:
        server.send(message)
        coordinator.send(message)
    desk.until(lambda: len(back) == len(desk.messages) == len(sizes), "all messages")
    assert back == messages
    assert desk.messages == [(3, message) for message in messages]
    assert server.queued_nbytes == coordinator.queued_nbytes == 0


def test_last_words_before_close_arrive_and_close_is_quiet(desk: Desk) -> None:
    server, _ = desk.pair()
    ends: list[End] = []
    server.listen(lambda message: None, ends.append)
    server.send(b"goodbye")
    server.close()
    server.close()
    assert server.closed
    server.send(b"nobody hears this")
    desk.until(lambda: desk.ends, "the end")
    assert desk.messages == [(3, b"goodbye")]
    assert [(who, end.kind) for who, end in desk.ends] == [(3, "eof")]
    assert ends == []


def test_a_reset_is_told_from_an_end_of_file(desk: Desk) -> None:
    server, coordinator = desk.pair()
    sock = server._stream.detach()
    assert sock is not None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    desk.until(lambda: desk.ends, "the end")
    assert desk.ends[0][1].kind == "reset"
    assert coordinator.closed


def test_a_peer_that_resets_at_once_is_not_taken_for_a_silent_one(caplog: pytest.LogCaptureFixture) -> None:
    """Its connection waits in the kernel until it is accepted, and has no other end then."""
    desk = Desk()
    sock = socket.create_connection(desk.listener.endpoint)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    desk.until(lambda: caplog.text, "the log says that a connection was closed")
    desk.close()
    assert "(reset)" in caplog.text


def test_a_port_without_a_listener_is_refused(desk: Desk) -> None:
    desk.listener.close()
    desk.dial()
    desk.until(lambda: desk.failed, "the failure")
    assert desk.failed[0].kind == "refused"
    assert HOST in desk.failed[0].why


def test_no_answer_is_a_timeout(desk: Desk) -> None:
    with socket.create_server((HOST, 0)) as mute:
        host, port = mute.getsockname()
        failed: list[End] = []
        dial(
            host, port, identity=Identity.of(TOKEN, JOB, 1), poller=desk.poller, timeout_s=0.1,
            on_open=desk.opened.append, on_fail=failed.append, expect_server=COORDINATOR,
        )  # fmt: skip
        desk.until(lambda: failed, "the failure")
        assert failed[0].kind == "timeout"
        cancelled = dial(
            host, port, identity=Identity.of(TOKEN, JOB, 1), poller=desk.poller, timeout_s=0.1,
            on_open=desk.opened.append, on_fail=failed.append, expect_server=COORDINATOR,
        )  # fmt: skip
        desk.poller.poll(0.01)
        cancelled.cancel()
        cancelled.cancel()
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"token": b"wrong"}, "wrong token"),
        ({"job": "other"}, "wrong job"),
        ({"expect_server": 5}, "another server"),
        ({"expect_incarnation": 5}, "another incarnation"),
    ],
)
def test_strangers(desk: Desk, options: dict[str, object], why: str) -> None:
    server, _ = desk.pair(7)
    desk.dial(8, **options)  # type: ignore[arg-type]
    desk.until(lambda: desk.failed, "the failure")
    assert desk.failed[0].kind == "auth"
    assert why in desk.failed[0].why
    server.send(b"still here")
    desk.until(lambda: (7, b"still here") in desk.messages, "a message of the other channel")


def test_garbage_and_slow_loris_do_not_disturb() -> None:
    desk = Desk(handshake_s=0.2)
    server, _ = desk.pair()
    rng = random.Random(6)
    for size in (0, 1, 100, 5000):
        with socket.create_connection(desk.listener.endpoint) as sock:
            sock.setblocking(False)
            with contextlib.suppress(ConnectionError):
                sock.sendall(rng.randbytes(size))
            read_all(sock, desk.poller)
    server.send(b"undisturbed")
    desk.until(lambda: desk.messages, "a message")
    assert list(desk.channels) == [3]
    desk.close()


def test_a_message_that_is_too_long_ends_the_channel() -> None:
    desk = Desk(max_message_nbytes=100)
    server, _ = desk.pair()
    ends: list[End] = []
    server.listen(lambda message: None, ends.append)
    server.send(bytes(100))
    server.send(bytes(101))
    desk.until(lambda: desk.ends and ends, "both ends")
    assert desk.messages == [(3, bytes(100))]
    assert desk.ends[0][1].kind == "malformed"
    assert "101 bytes" in desk.ends[0][1].why
    assert len(desk.ends) == 1
    desk.close()


def test_fuzzed_streams_never_crash(desk: Desk) -> None:
    rng = random.Random(8)
    for number in range(30):
        server, _ = desk.pair(number)
        sock = server._stream.detach()
        assert sock is not None
        sock.sendall(rng.randbytes(rng.randrange(200)))
        sock.close()
    desk.until(lambda: len(desk.ends) == 30, "all of them ended")
    assert {end.kind for _, end in desk.ends} <= {"malformed", "eof"}


def test_a_reader_that_does_not_read_overflows_the_queue(desk: Desk) -> None:
    server, coordinator = desk.pair()
    coordinator._stream.mute()
    ends: list[End] = []
    server.listen(lambda message: None, ends.append)
    chunk = bytes(8 << 20)
    for _ in range(MAX_QUEUED_NBYTES // len(chunk) + 3):
        server.send(chunk)
    assert not ends
    desk.until(lambda: ends, "the overflow")
    assert [end.kind for end in ends] == ["overflow"]
    assert server.closed


def test_a_message_that_the_other_side_would_not_take_is_refused(desk: Desk) -> None:
    server, _ = desk.pair()
    with pytest.raises(UsageError, match="at most"):
        server.send(bytes(MAX_MESSAGE_NBYTES + 1))
    assert not server.closed


def test_an_inherited_socket_and_a_taken_port(desk: Desk) -> None:
    identity = Identity.of(TOKEN, JOB, COORDINATOR)
    with pytest.raises(FabricError, match="another port"):
        ControlListener(
            *desk.listener.endpoint, identity=identity, poller=desk.poller, on_connect=desk.connected
        )
    inherited = socket.create_server((HOST, 0))
    endpoint = inherited.getsockname()
    listener = ControlListener(
        "", identity=identity, poller=desk.poller, on_connect=desk.connected, listening=inherited
    )
    assert listener.endpoint == endpoint
    desk.listener.close()
    desk.listener = listener
    desk.pair(4)
    with pytest.raises(UsageError, match="numeric"):
        dial(
            "localhost", 1, identity=Identity.of(TOKEN, JOB, 1), poller=desk.poller,
            on_open=desk.opened.append, on_fail=desk.failed.append, expect_server=COORDINATOR,
        )  # fmt: skip
