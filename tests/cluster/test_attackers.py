"""A job of real processes while somebody without the token hammers all its ports: it does not even notice."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import bml
from bml.cluster.job import Contact
from bml.transport.auth import NONCE_NBYTES, Beat, DialerHandshake, Hello, Role, seal_beat

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

ATTACK_S = 2.0
LONG = 2000
Endpoint = tuple[str, int]


def train(session: bml.Session) -> dict[str, Any]:
    """Every step adds ones; it goes on until server 0 says that the attack is over."""
    w = session.empty(LONG)
    w[:] = 0
    session.state(params=w)
    begun_s = time.monotonic()
    steps = 0
    while True:
        over = np.float32(session.server == 0 and time.monotonic() - begun_s > ATTACK_S + 1.0)
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
        self, contacts: dict[int, Contact], job: bytes, recorded: dict[Endpoint, bytes], beat: bytes
    ) -> None:
        self.tried: dict[str, int] = {}
        self.answered = 0
        self.errors: list[BaseException] = []
        self._chance = random.Random(5)
        self._job = job
        self._recorded = recorded
        self._beat = beat
        self._data = [(e, Role.DATA, level) for c in contacts.values() for level, e in enumerate(c.nics)]
        self._control = [(c.control, Role.CONTROL, 0) for c in contacts.values()]
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
                    for attack in (
                        self._garbage,
                        self._silence,
                        self._wrong_token,
                        self._replay,
                        self._flood,
                    ):
                        with suppress(ConnectionError, TimeoutError):
                            attack(*target)
                        name = attack.__name__
                        self.tried[name] = self.tried.get(name, 0) + 1
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
            dialer = DialerHandshake(b"not the token", me, self._chance.randbytes(NONCE_NBYTES))
            dialer.start()
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
                seal_beat(b"not the token", self._job, Beat(1, 0, level, time.time_ns())),
                self._beat,
            ):
                for _ in range(5):
                    sock.sendto(datagram, endpoint)

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        return socket.create_connection(endpoint, timeout=2.0)


def recording(token: bytes, hello: Hello, endpoint: Endpoint) -> bytes:
    """What somebody with the token once said to this port, overheard."""
    with socket.create_connection(endpoint, timeout=5.0) as sock:
        dialer = DialerHandshake(token, hello, b"n" * NONCE_NBYTES)
        dialer.start()
        return dialer.feed(said(sock, dialer.wants_nbytes))


def test_without_the_token_nobody_joins_reads_or_disturbs() -> None:
    with bml.start(train, "bcube:2x2", launcher="processes", detect_s=2.0) as job:
        contacts: dict[int, Contact] = dict(job._fleet._contacts)  # type: ignore[attr-defined]
        token, name = job.spec.token, job.spec.job.encode()
        recorded = {}
        for contact in contacts.values():
            for level, endpoint in enumerate(contact.nics):
                recorded[endpoint] = recording(token, Hello(Role.DATA, name, 0, level), endpoint)
            hello = Hello(Role.CONTROL, name, 0xFFFF_FFFF, 0)
            recorded[contact.control] = recording(token, hello, contact.control)
        attacker = Attacker(contacts, name, recorded, seal_beat(token, name, Beat(1, 0, 0, 1)))
        with attacker.at_work():
            time.sleep(ATTACK_S)
        result = job.wait(60)
    print(attacker.tried)
    assert attacker.errors == []
    assert min(attacker.tried.values()) > 20, "it hardly tried"
    assert attacker.answered == 0
    assert [view["reason"] for view in result.report["views"]] == ["start"]
    assert sorted(result.values) == [0, 1, 2, 3]
    assert result.dead == {}
    assert len(set(result.report["digests"].values())) == 1
    np.testing.assert_array_equal(result.value["params"], np.full(LONG, result.value["steps"], np.float32))
