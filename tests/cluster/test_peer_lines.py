"""Channels between servers: a server that is alive loses nothing, whatever becomes of one connection."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bml.cluster.server.peer_lines import PeerLines
from bml.cluster.spec.job import JobSpec
from bml.io.poller import Poller
from bml.transport.handshake import control
from bml.transport.handshake.auth import Hello, Identity

HOST = "127.77.9.3"
SPEC = JobSpec("switch:3", detect_s=0.1)
WITHIN_S = 30.0


class Node:
    """A server that is nothing but its channels; `incarnations` are what it knows of all."""

    def __init__(self, server: int, port: int = 0, incarnation: int = 0, spec: JobSpec = SPEC):
        self.poller = Poller()
        self.server = server
        self.came: list[tuple[int, bytes]] = []
        self.unsent: list[int] = []
        self.reasons: list[str] = []
        self.cut: list[int] = []
        self._take: Callable[[control.Channel, Hello], None]
        self._close: Callable[[], None]
        self.listener = control.ControlListener(
            HOST,
            port,
            identity=Identity.of(SPEC.token, SPEC.job, server, incarnation),
            poller=self.poller,
            on_connect=lambda channel, hello: self._take(channel, hello),
        )
        self.peers = SimpleNamespace(contacts={}, incarnations={server: incarnation})
        self.view = SimpleNamespace(epoch=1, members=[0, 1, 2])
        shell: Any = SimpleNamespace(
            poller=self.poller,
            peers=self.peers,
            core=SimpleNamespace(view=self.view),
            mailbox=SimpleNamespace(stopped=False),
            line=SimpleNamespace(take_peers=self._take_peers),
        )
        self.lines = PeerLines(
            shell,
            server,
            spec,
            self._came,
            self._not_sent,
            lambda peer, why: self.cut.append(peer),
        )

    def _take_peers(self, take: Any, close: Any) -> None:
        self._take, self._close = take, close

    def _came(self, peer: int, message: bytes, answer: Callable[[bytes], None]) -> None:
        self.came.append((peer, message))
        if not message.startswith(b"answer"):
            answer(b"answer to " + message)

    def _not_sent(self, peer: int, why: str) -> None:
        self.unsent.append(peer)
        self.reasons.append(why)

    def knows(self, server: int, endpoint: tuple[str, int]) -> None:
        self.peers.contacts[server] = SimpleNamespace(control=endpoint)

    def close(self) -> None:
        self._close()
        self.listener.close()
        self.poller.close()


@contextmanager
def nodes(*made: Node) -> Iterator[None]:
    """They know each other; all are closed at the end."""
    for node in made:
        for other in made:
            node.knows(other.server, other.listener.endpoint)
    try:
        yield
    finally:
        for node in made:
            node.close()


def until(holds: Callable[[], bool], *turning: Node) -> None:
    """Poll for these until something holds."""
    end_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end_s
        for node in turning:
            node.poller.poll(0.005)


def test_messages_and_answers_pass() -> None:
    one, two = Node(0), Node(1)
    with nodes(one, two):
        one.lines.send(1, b"a")
        one.lines.send(1, b"b")
        two.lines.send(0, b"c")
        until(lambda: len(one.came) == 3 and len(two.came) == 3, one, two)
        assert sorted(one.came) == [(1, b"answer to a"), (1, b"answer to b"), (1, b"c")]
        assert [message for _, message in two.came if message != b"answer to c"] == [b"a", b"b"]
        assert one.unsent + one.cut + two.unsent + two.cut == []


@pytest.mark.slow
def test_a_peer_that_answers_no_dial_yet_loses_nothing() -> None:
    """Its port refuses, then accepts without a word longer than a dial may take, then it is there."""
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
    one = Node(0)
    with nodes(one):
        one.knows(1, (HOST, port))
        one.lines.send(1, b"a")
        refused_until_s = time.monotonic() + 0.3
        until(lambda: time.monotonic() > refused_until_s, one)
        with socket.create_server((HOST, port)) as silent:
            silent.setblocking(False)
            dials: list[socket.socket] = []

            def accepted() -> bool:
                try:
                    dials.append(silent.accept()[0])
                except BlockingIOError:
                    return False
                return len(dials) == 2  # it gave the first one up

            until(accepted, one)
        for each in dials:
            each.close()
        two = Node(1, port)
        with nodes(two):
            two.knows(0, one.listener.endpoint)
            until(lambda: one.came == [(1, b"answer to a")], one, two)
        assert two.came == [(0, b"a")]
        assert one.unsent == []


@pytest.mark.slow
def test_a_peer_that_lives_behind_a_blocked_path_is_given_up_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is in the view, as what it sends arrives; what is sent to it does not, and waits no longer."""
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
    one = Node(0, spec=replace(SPEC, start_s=1.0))
    with nodes(one):
        one.knows(1, (HOST, port))
        one.lines.send(1, b"a")
        begun_s = time.monotonic()
        until(lambda: bool(one.unsent), one)
        assert time.monotonic() - begun_s >= 1.0
        assert one.unsent == [1]
        assert "it is alive, but its port did not answer for" in one.reasons[0]
        assert "refused" in one.reasons[0]
        (warning,) = {
            each.message for each in caplog.records if "waits, as it does not answer" in each.message
        }
        assert f"server 1 waits, as it does not answer at {HOST}:{port}: " in warning
        assert "it is dialled for up to 1 s" in warning
        two = Node(1, port)
        with nodes(two):
            two.knows(0, one.listener.endpoint)
            one.lines.send(1, b"b")
            until(lambda: one.came == [(1, b"answer to b")], one, two)
        assert two.came == [(0, b"b")], "the first message was given up"


def test_a_peer_that_is_out_of_the_view_is_dialled_no_more() -> None:
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
    one = Node(0)
    with nodes(one):
        one.knows(1, (HOST, port))
        one.lines.send(1, b"a")
        one.view.members.remove(1)
        until(lambda: bool(one.unsent), one)
        assert (one.unsent, one.cut) == ([1], [])


def test_a_second_connection_of_a_living_peer_drops_nothing_of_the_other_direction() -> None:
    one, two = Node(0), Node(1)
    with nodes(one, two):
        one.lines.send(1, b"a")
        two.lines.send(0, b"b")
        until(lambda: len(one.came) == len(two.came) == 2, one, two)
        opened: list[control.Channel] = []
        control.dial(
            *one.listener.endpoint,
            identity=Identity.of(SPEC.token, SPEC.job, 1),
            expect_server=0,
            poller=two.poller,
            on_open=opened.append,
            on_fail=lambda end: pytest.fail(end.why),
        )
        until(lambda: bool(opened) and bool(one.cut), one, two)
        assert (one.unsent, one.cut) == ([], [1])
        with closing(opened[0]):
            one.lines.send(1, b"c")
            until(lambda: two.came[-1] == (0, b"c"), one, two)
            until(lambda: bool(two.unsent), one, two)
            assert (two.unsent, two.cut) == ([0], [])


def test_while_a_peer_is_dialled_its_own_connection_may_end() -> None:
    """The dial goes on, and there is only one."""
    one, two = Node(0), Node(1)
    with nodes(one, two):
        two.lines.send(0, b"b")
        until(lambda: len(one.came) == 1 and len(two.came) == 1, one, two)
        one.lines.send(1, b"a")
        two.lines.hang_up(0)
        until(lambda: bool(one.cut), one)  # two does not answer the dial meanwhile
        one.lines.send(1, b"c")
        until(lambda: len(two.came) == 3, one, two)
        assert two.came[1:] == [(0, b"a"), (0, b"c")]
        assert one.unsent == []


def test_a_peer_that_was_started_again_gets_nothing_of_before() -> None:
    one, two = Node(0), Node(1)
    again = Node(1, incarnation=4)
    with nodes(one, two), nodes(again):
        one.lines.send(1, b"a")
        until(lambda: len(one.came) == 1, one, two)
        one.peers.incarnations[1] = 4
        one.knows(1, again.listener.endpoint)
        one.lines.send(1, b"b")
        until(lambda: bool(one.unsent), one, two, again)
        one.lines.send(1, b"c")
        until(lambda: len(one.came) == 2, one, two, again)
        assert (two.came, again.came) == ([(0, b"a")], [(0, b"c")])
        two.knows(0, one.listener.endpoint)
        two.lines.send(0, b"late")
        again.knows(0, one.listener.endpoint)
        again.lines.send(0, b"new")
        until(lambda: one.came[-1] == (1, b"new") and bool(two.unsent), one, two, again)
        assert (1, b"late") not in one.came
