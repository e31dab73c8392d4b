"""Who has the token and talks nonsense: his connection is closed, and server and coordinator live on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, deliver_challenge
from typing import Any

import pytest

from bml.cluster.fleets.actuators import apply_fault_through
from bml.cluster.process.coordinator import CoordinatorLoop
from bml.cluster.server.server import Server
from bml.cluster.spec.job import Contact, JobSpec, check_contacts
from bml.faults import Fault
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import Incarnation, MessageError, View
from bml.transport.handshake import control
from bml.transport.handshake.auth import Identity

SPEC = JobSpec("bcube:2x1", job="crafted", token=b"token")
DEADLINE_S = 30.0


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(SPEC, 1, ["127.78.0.2"])
    yield made
    made._shell.close()


class Caller:
    """A control connection to a server, on the server's own poller."""

    def __init__(self, server: Server, as_server: int = control.COORDINATOR) -> None:
        self.said: list[msg.Message] = []
        self.ends: list[control.End] = []
        self.channel: control.Channel | None = None
        self._poller = server._shell.poller
        host, port = server.contact.control
        control.dial(
            host, port, identity=Identity.of(SPEC.token, SPEC.job, as_server), poller=self._poller,
            on_open=self._opened, on_fail=self.ends.append, expect_server=1,
        )  # fmt: skip
        self.until(lambda: self.channel or self.ends)

    def _opened(self, channel: control.Channel) -> None:
        self.channel = channel
        channel.listen(lambda data: self.said.append(msg.decode(data)), self.ends.append)

    def send(self, data: bytes) -> None:
        assert self.channel is not None
        self.channel.send(data)

    def until(self, condition: Callable[[], Any]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s, "it did not come to that"
            self._poller.poll(0.01)


NONSENSE = {
    "no message": b"\xff\xfe",
    "nothing": b"",
    "for a coordinator": msg.encode(msg.CanSendState(1)),
    "an epoch that no frame has": msg.encode(msg.Freeze(1, 1 << 40, "")),
    "a view of others": msg.encode(msg.Propose(1, View(1, (0, 1, 2), (), 0, "", 0.0))),
    "an address that is none": msg.encode(
        msg.Propose(1, View(1, (0, 1), (), 0, "", 0.0, joined=(Incarnation(0, 3, '{"server":0}'),)))
    ),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_coordinator_that_talks_nonsense_is_hung_up_on(server: Server, data: bytes) -> None:
    bad = Caller(server)
    bad.send(data)
    bad.until(lambda: bad.ends)
    good = Caller(server)
    good.send(msg.encode(msg.Who(3)))
    good.until(lambda: good.said)
    assert isinstance(good.said[0], msg.Status)
    assert good.said[0].installed is None
    assert good.channel is not None
    good.channel.close()


def test_only_a_coordinator_may_call(server: Server) -> None:
    good = Caller(server)
    stranger = Caller(server, as_server=0)
    stranger.until(lambda: stranger.ends)
    good.send(msg.encode(msg.Who(3)))
    good.until(lambda: good.said)
    assert good.channel is not None
    good.channel.close()


class Line:
    """A control connection, seen from the coordinator."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (b"\xff", True),
        (msg.encode(msg.Who(3)), True),
        (msg.encode(msg.CanSendState(1)), True),  # in another's name
        (msg.encode(msg.Inject("kill:1")), True),
        (msg.encode(msg.Inject("join:9")), True),
        (msg.encode(msg.Inject("nonsense")), True),
        (msg.encode(msg.Status(0, 1, 0, 0, None, None, 0, -1, "", "", Incarnation(0, 3, "nowhere"))), True),
        (msg.encode(msg.Inject("join:1")), False),
        (msg.encode(msg.CanSendState(0)), False),
    ],
)
def test_a_server_that_talks_nonsense_is_hung_up_on(data: bytes, refused: bool) -> None:
    loop = CoordinatorLoop(SPEC, {}, {}, 1, lambda now: None, lambda: None)
    line = Line()
    loop._received(0, line, data)  # type: ignore[arg-type]
    assert line.closed is refused
    assert [text for _, text in loop.snapshot()["asked"]] == (
        ["join:1"] if data == msg.encode(msg.Inject("join:1")) else []
    )
    loop._poller.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        '{"server":1,"control":["localhost",5],"nics":[["127.0.0.1",5]]}',
        '{"server":1,"control":["127.0.0.1",0],"nics":[["127.0.0.1",5]]}',
        '{"server":1,"control":["127.0.0.1",5],"nics":[["127.0.0.1",65536]]}',
        '{"server":1,"control":["127.0.0.1",5],"nics":[]}',
        '{"server":2,"control":["127.0.0.1",5],"nics":[["127.0.0.1",5]]}',
    ],
)
def test_incarnations_that_are_nowhere(text: str) -> None:
    with pytest.raises(MessageError):
        check_contacts([Incarnation(1, 3, text)], levels=1)


def test_an_incarnation_that_is_somewhere() -> None:
    contact = Contact(1, ("127.0.0.1", 5), (("::1", 6),))
    check_contacts([Incarnation(1, 3, contact.encode())], levels=1)
    assert Contact.decode(contact.encode()) == contact


def test_a_server_signs_no_challenge_with_the_token_itself() -> None:
    """The standard library's handshake signs whatever it is sent; it must have a key of its own for that."""
    refused: list[bool] = []
    with socket.create_server(("127.78.0.9", 0)) as listener:

        def launcher() -> None:
            sock, _ = listener.accept()
            with Connection(sock.detach()) as connection:
                try:
                    deliver_challenge(connection, SPEC.token)
                except AuthenticationError:
                    refused.append(True)

        thread = threading.Thread(target=launcher)
        thread.start()
        apply_fault_through(listener.getsockname(), SPEC.token, DEADLINE_S)(
            Fault.parse("cut:1/0", at_once=True)
        )
        thread.join(DEADLINE_S)
    assert refused == [True]
