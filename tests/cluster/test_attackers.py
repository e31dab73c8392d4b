"""A job of real processes while somebody without the token hammers all its ports: it does not even notice."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relays import Relay, Relayed

import bml
from bml.cluster.spec.job import Contact
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind, pack
from bml.transport.handshake.auth import NONCE_NBYTES, DialerHandshake, Hello, Role
from bml.transport.handshake.sealing import Heartbeat, seal_heartbeat

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

DEADLINE_S = 60.0
ATTACKS = 20
"""How often each kind is tried, at least."""
LONG = 2000
Endpoint = tuple[str, int]


def train(session: bml.Session, stop: Path) -> dict[str, Any]:
    """Every step adds ones; it goes on until the file says that the attack is over."""
    w = session.empty(LONG)
    w[:] = 0
    session.state(params=w)
    steps = 0
    while True:
        over = np.float32(session.server == 0 and stop.exists())
        total = session.allreduce(np.append(np.ones(LONG, np.float32), over))
        steps += 1
        w += total[:-1] / np.float32(len(session.contributors))
        if total[-1]:
            return {"params": w, "steps": steps}


def said(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            break
        data += more
    return data


class Attacker:
    """Knows where everybody listens, the job's name and how all is written, but not the token."""

    def __init__(
        self, contacts: dict[int, Contact], job: bytes, recorded: dict[Endpoint, bytes], heartbeat: bytes
    ) -> None:
        self._attacks = (self._garbage, self._silence, self._wrong_token, self._replay, self._flood)
        self.tried = {attack.__name__: 0 for attack in self._attacks}
        self.answered = 0
        self.errors: list[BaseException] = []
        self._chance = random.Random(5)
        self._job = job
        self._recorded = recorded
        self._heartbeat = heartbeat
        self._data = [(e, Role.DATA, level) for c in contacts.values() for level, e in enumerate(c.nics)]
        self._control = [(c.control, Role.CONTROL, 0) for c in contacts.values()]
        self._servers = {e: server for server, c in contacts.items() for e in (c.control, *c.nics)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attacker")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for target in (*self._data, *self._control):
                    for attack in self._attacks:
                        with suppress(ConnectionError, TimeoutError):
                            attack(*target)
                        self.tried[attack.__name__] += 1
        except BaseException as error:
            self.errors.append(error)

    def _garbage(self, endpoint: Endpoint, role: Role, level: int) -> None:
        with self._connect(endpoint) as sock:
            sock.sendall(self._chance.randbytes(self._chance.randrange(1, 3000)))

    def _silence(self, endpoint: Endpoint, role: Role, level: int) -> None:
        self._connect(endpoint).close()

    def _wrong_token(self, endpoint: Endpoint, role: Role, level: int) -> None:
        with self._connect(endpoint) as sock:
            me = Hello(role, self._job, self._chance.choice((0, 1, 2, 3, 0xFFFF_FFFF)), level)
            server = self._servers[endpoint]
            dialer = DialerHandshake(b"not the token", me, self._chance.randbytes(NONCE_NBYTES), server)
            dialer.start(sock.getsockname(), endpoint)
            sock.sendall(dialer.feed(said(sock, dialer.wants_nbytes)))
            dialer.feed(said(sock, dialer.wants_nbytes))
            self.answered += dialer.done
            assert "wrong token" in dialer.error or not dialer.error

    def _replay(self, endpoint: Endpoint, role: Role, level: int) -> None:
        with self._connect(endpoint) as sock:
            sock.sendall(self._recorded[endpoint])
            answer = said(sock, 1 << 12)
            self.answered += len(answer) > 400  # more than a challenge and a refusal

    def _flood(self, endpoint: Endpoint, role: Role, level: int) -> None:
        if role is Role.CONTROL:
            return
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for datagram in (
                self._chance.randbytes(self._chance.randrange(100)),
                seal_heartbeat(b"not the token", self._job, Heartbeat(1, 0, level, time.time_ns())),
                self._heartbeat,
            ):
                for _ in range(5):
                    sock.sendto(datagram, endpoint)

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        return socket.create_connection(endpoint, timeout=2.0)


def recording(token: bytes, hello: Hello, server: int, endpoint: Endpoint) -> bytes:
    """What somebody with the token once said to this port of a server, overheard."""
    with socket.create_connection(endpoint, timeout=5.0) as sock:
        dialer = DialerHandshake(token, hello, b"n" * NONCE_NBYTES, server)
        dialer.start(sock.getsockname(), endpoint)
        return dialer.feed(said(sock, dialer.wants_nbytes))


def test_without_the_token_nobody_joins_reads_or_disturbs(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with bml.start(
        lambda session: train(session, stop), "bcube:2x2", launcher="processes", detect_s=2.0
    ) as job:
        contacts: dict[int, Contact] = dict(job._fleet._known.contacts)  # type: ignore[attr-defined]
        token, name = job.spec.token, job.spec.job.encode()
        recorded = {}
        for server, contact in contacts.items():
            for level, endpoint in enumerate(contact.nics):
                recorded[endpoint] = recording(token, Hello(Role.DATA, name, 0, level), server, endpoint)
            hello = Hello(Role.CONTROL, name, 0xFFFF_FFFF, 0)
            recorded[contact.control] = recording(token, hello, server, contact.control)
        attacker = Attacker(contacts, name, recorded, seal_heartbeat(token, name, Heartbeat(1, 0, 0, 1)))
        with attacker.at_work():
            deadline = time.monotonic() + 2 * DEADLINE_S
            while not attacker.errors and min(attacker.tried.values()) <= ATTACKS:
                assert time.monotonic() < deadline, f"it hardly tried: {attacker.tried}"
                time.sleep(0.05)
            steps = job.status()["step"]
            wait_for(lambda: job.status()["step"] > steps + 10 or not job.running)
        stop.touch()
        result = job.wait(60)
    print(attacker.tried)
    assert attacker.errors == []
    assert attacker.answered == 0
    assert [view["reason"] for view in result.report["views"]] == ["start"]
    assert sorted(result.values) == [0, 1, 2, 3]
    assert result.dead == {}
    assert len(set(result.report["digests"].values())) == 1
    np.testing.assert_array_equal(result.value["params"], np.full(LONG, result.value["steps"], np.float32))


def train_until(path: Path) -> Callable[[bml.Session], int]:
    def train(session: bml.Session) -> int:
        """Steps until the file is there."""
        steps = 0
        while True:
            stop = session.allreduce(np.array([path.exists()]).astype(np.int32), op="max")
            steps += 1
            if stop[0]:
                return steps

    return train


@pytest.mark.timeout(240)  # the addresses of a dead server may be in use for a minute
def test_nobody_becomes_coordinator_by_relaying_what_is_said_to_a_dead_server(tmp_path: Path) -> None:
    """It has taken the addresses of server 3, which is dead; a new coordinator dials all that it knows of."""
    stop = tmp_path / "stop"
    abort = msg.encode(msg.Abort(1 << 62, "training", "an attacker says so", 0))
    injected = len(abort).to_bytes(4, "big") + abort
    with bml.start(train_until(stop), "bcube:2x2", launcher="processes", transport="tcp") as job:
        contacts: dict[int, Contact] = dict(job._fleet._known.contacts)  # type: ignore[attr-defined]
        dead, victim = contacts[3], contacts[0]
        job.inject("kill:3")
        wait_for(lambda: job.status()["epoch"] == 2)
        with ExitStack() as seats:
            control = seats.enter_context(Relay(dead.control, victim.control, injected))
            for seat, target in zip(dead.nics, contacts[2].nics, strict=True):
                seats.enter_context(Relay(seat, target, pack(Header(Kind.TOKEN, 2, 9, 0, 0, 0, 0, 0, 0))))
            job.inject("coordinator")
            with control.moved:
                assert control.moved.wait_for(
                    lambda: (len(control.relayed) >= 3 and spoken(control)) or not job.running, DEADLINE_S
                )
            assert job.running, "somebody obeyed the attacker"
            steps = job.status()["step"]
            wait_for(lambda: job.status()["step"] > steps + 10)
        stop.touch()
        result = job.wait(DEADLINE_S)
    said, answered = spoken(control)[0]
    assert len(said) > 100, "a coordinator proved itself"
    assert len(answered) > 100, "the server told why it refused"
    assert sorted(result.values) == [0, 1, 2]
    assert len(set(result.values.values())) == 1
    assert [view["members"] for view in result.report["views"]] == [[0, 1, 2, 3], [0, 1, 2]]


def spoken(relay: Relay) -> list[Relayed]:
    """The connections in which the dialer said something: another may only see whether the port is open."""
    return [each for each in relay.relayed if each.said]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
