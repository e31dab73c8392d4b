"""More than 100,000 messages that nobody of ours would send: refused, dropped, or valid; never a crash.

Everything is drawn from fixed seeds. What is fuzzed is the real thing up to the socket: handshakes,
heartbeats, control messages, and whole connections into a server (its core, its memory, its shell) that is in
the middle of a step, or that learns. Afterwards that server must take an honest step, exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from fuzzing import CASES, EDGES, damaged

from bml.cluster.server.assembly import Assembly
from bml.cluster.server.server import Server
from bml.cluster.spec.job import Contact, JobSpec
from bml.io.sendqueue import Counters
from bml.protocol.server import events as ev
from bml.protocol.server.transfer import Head
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import _LAYOUT, HEADER_NBYTES, MAGIC, VERSION, FrameError, Header, Kind, unpack
from bml.protocol.wire.messages import Incarnation, View
from bml.train.communicator import Committed
from bml.transport.handshake.auth import HANDSHAKE_NBYTES, AcceptorHandshake, DialerHandshake, Hello, Role
from bml.transport.handshake.sealing import Heartbeat, open_heartbeat, seal_heartbeat
from bml.transport.tcp.incoming import Incoming

pytestmark = pytest.mark.timeout(120)


def test_there_are_enough_cases() -> None:
    assert sum(CASES.values()) >= 100_000


# --- who comes in ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_handshakes_without_the_token_never_succeed() -> None:
    chance = random.Random(1)
    me, other = Hello(Role.DATA, b"job", 5, 1), Hello(Role.DATA, b"job", 2, 1, 3)
    here, there = ("10.0.0.5", 5000), ("10.0.0.2", 2000)
    for _ in range(CASES["handshakes"]):
        token, wrong = b"token", chance.choice((b"", b"token ", b"Token", chance.randbytes(16)))
        nonce = chance.randbytes(32)
        attacker = DialerHandshake(wrong or b"?", other, chance.randbytes(32), 5)
        victim: AcceptorHandshake | DialerHandshake = AcceptorHandshake(token, me, nonce)
        challenge = victim.start(here, there)
        attacker.start(there, here)
        said = attacker.feed(challenge)
        if chance.random() < 0.5:
            server = AcceptorHandshake(wrong or b"?", me, chance.randbytes(32))
            said = server.start(here, there) + server.feed(said)
            victim = DialerHandshake(token, other, nonce, 5, 0)
            victim.start(there, here)
        stream = damaged(chance, said)
        taken = 0
        while stream and victim.wants_nbytes:
            part, stream = stream[: victim.wants_nbytes], stream[victim.wants_nbytes :]
            victim.feed(part)
            taken += len(part)
        assert not victim.done
        assert victim.peer is None
        assert taken <= HANDSHAKE_NBYTES


def test_datagrams_without_the_token_are_no_heartbeats() -> None:
    chance = random.Random(2)
    for _ in range(CASES["heartbeats"]):
        heartbeat = Heartbeat(chance.choice(EDGES) & 0xFFFFFFFF, 2, 0, chance.choice(EDGES))
        assert open_heartbeat(b"token", b"job", seal_heartbeat(b"Token", b"job", heartbeat)) is None
        good = seal_heartbeat(b"token", b"job", heartbeat)
        data = damaged(chance, good)
        assert (open_heartbeat(b"token", b"job", data) == heartbeat) is (data == good)


# --- frames ----------------------------------------------------------------------------------------


def raw(header: Header) -> bytes:
    """Packed whatever it says: fields are cut to their width."""
    kind, epoch, step, origin, dest, signature, start, stop, nbytes = (int(field) for field in header)
    u16, u32, u64 = 2**16 - 1, 2**32 - 1, 2**64 - 1
    return _LAYOUT.pack(
        MAGIC,
        VERSION,
        kind & 255,
        origin & u16,
        dest & u16,
        0,
        epoch & u32,
        signature & u32,
        step & u64,
        start & u64,
        stop & u64,
        nbytes & u32,
    )


def odd(chance: random.Random, header: Header) -> Header:
    """Up to three fields say something else; the payload's length often still fits."""
    fields = list(header)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(fields))
        near = int(fields[at]) + chance.choice((-1, 1, 2))
        fields[at] = chance.choice((near, chance.choice(EDGES), chance.randrange(8)))
    made = Header(*fields)
    if chance.random() < 0.5:
        itemsize = chance.choice((1, 8))
        made = made._replace(nbytes=max(0, made.stop - made.start) * itemsize)
    return made


@pytest.mark.slow
def test_headers_are_read_or_refused() -> None:
    chance = random.Random(3)
    good = Header(Kind.REDUCE, 3, 7, 0, 1, 77, 0, 5, 40)
    for _ in range(CASES["headers"]):
        data = damaged(chance, raw(odd(chance, good._replace(kind=Kind(chance.randrange(6))))))
        try:
            header = unpack(data)
        except FrameError:
            continue
        assert header.nbytes <= 64 << 20
        assert header.start <= header.stop or header.kind == Kind.TOKEN


N, SIGNATURE = 10, 77
PEER, ME = 0, 1


class Victim:
    """Server 1 of bcube:2x1, all of it but its thread; server 0's connection is fuzzed."""

    def __init__(self, incarnation: int | None, algorithm: str = "bml") -> None:
        self.spec = JobSpec("bcube:2x1", algorithm, job="fuzzed", token=b"token")
        self.server = Server(self.spec, ME, ["127.78.0.2"], incarnation=incarnation)
        peer = Contact(PEER, ("127.78.0.1", 9), (("127.78.0.1", 9),))
        self.shell = self.server._shell
        self.shell.peers.contacts = {PEER: peer, ME: self.server.contact}
        self.joined = (
            () if incarnation is None else (Incarnation(ME, incarnation, self.server.contact.encode()),)
        )
        self.core = self.shell.core
        self.epoch = 0

    def close(self) -> None:
        self.shell.close()

    def control(self, message: msg.ToServer) -> None:
        self.shell.execution.execute(self.core.handle(ev.Control(message), 0.0))

    def view(self, learns: bool) -> None:
        """A new view, in which this server learns or not."""
        self.epoch += 1
        commit = self.core.committed if self.core.view else 0
        learners = (ME,) if learns else ()
        view = View(self.epoch, (PEER, ME), (), commit, "test", 0.0, learners=learners, joined=self.joined)
        for message in (
            msg.Freeze(1, self.epoch, "test"),
            msg.Propose(1, view),
            msg.Install(1, self.epoch),
        ):
            self.control(message)

    def submit(self, n: int = N) -> None:
        """The user brings ones to the step that comes."""
        self.shell.mailbox.contribution = (np.ones(n), "sum")
        call = Call("sum", "<f8", n, "sum")
        event = ev.Submit(self.core.step, self.core.epoch, call, SIGNATURE)
        self.shell.execution.execute(self.core.handle(event, 0.0))

    def header(self, kind: Kind, start: int = 0, stop: int = 0, nbytes: int | None = None) -> Header:
        itemsize = 8 if kind <= Kind.BROADCAST else 1
        length = (stop - start) * itemsize if nbytes is None else nbytes
        step = self.core.step - (kind >= Kind.HEAD)
        return Header(kind, self.core.epoch, step, PEER, ME, SIGNATURE, start, stop, length)

    def honest(self) -> list[tuple[Header, bytes]]:
        """The frames of server 0, who brings twos."""
        text = Call("sum", "<f8", N, "sum").encode()
        if self.spec.algorithm == "exchange":
            sums = [(self.header(Kind.REDUCE, 0, N), np.full(N, 2.0).tobytes())]
        else:
            sums = [
                (self.header(Kind.REDUCE, 5, N), np.full(5, 2.0).tobytes()),
                (self.header(Kind.BROADCAST, 0, 5), np.full(5, 3.0).tobytes()),
            ]
        return [(self.header(Kind.DESCRIBE, 0, len(text)), text), *sums, (self.header(Kind.TOKEN), b"")]

    def state(self) -> list[tuple[Header, bytes]]:
        """Some of a joiner's state."""
        text = Head(100, Head.decode("100 0 1 40 x y").part, "x", "y").encode()
        head = (self.header(Kind.HEAD, 0, len(text)), text)
        pieces = [
            (self.header(Kind.STATE, a, min(a + 40, 100)), bytes(min(40, 100 - a))) for a in (0, 40, 80)
        ]
        return [head, *pieces]

    def connection(self) -> Connection:
        return Connection(self.shell)

    def takes_an_honest_step(self) -> None:
        """Nothing of what came before is in it."""
        self.view(learns=False)
        while not self.shell.mailbox.replies.empty():
            self.shell.mailbox.replies.get()
        self.submit()
        connection = self.connection()
        for header, payload in self.honest():
            connection.feed(raw(header) + payload)
        reply = self.shell.mailbox.replies.get(timeout=1.0)
        assert isinstance(reply, Committed), reply
        np.testing.assert_array_equal(reply.result, np.full(N, 3.0))


class Connection:
    """The receiving half of a connection to the victim; a FrameError closes it."""

    def __init__(self, shell: Assembly) -> None:
        self.closed = False
        self._incoming = Incoming(
            partial(shell.arrivals.admit, PEER, 0),
            partial(shell.arrivals.received, PEER, 0),
            Counters(),
            64 << 20,
        )

    def feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not self.closed and not self._incoming.paused:
            for buffer in self._incoming.buffers():
                take = min(len(buffer), len(rest))
                buffer[:take] = rest[:take]
                rest = rest[take:]
                try:
                    self._incoming.advance(take)
                except FrameError:
                    self.closed = True
                break


def fuzz(victim: Victim, seed: int, cases: int, learns: bool) -> None:
    """Bursts of frames, each burst in a view of its own, while a step is under way or is followed."""
    chance = random.Random(seed)
    tried = 0
    while tried < cases:
        victim.view(learns)
        if not learns and chance.random() < 0.9:
            victim.submit(chance.choice((N, N, N, 1, 0)))
        connection = victim.connection()
        for _ in range(chance.randrange(1, 25)):
            header, payload = chance.choice(victim.honest() + victim.state())
            if chance.random() < 0.8:
                header = odd(chance, header)
            if chance.random() < 0.2:
                payload = damaged(chance, payload)
            payload = (payload * 200)[: min(header.nbytes, 2000)] if chance.random() < 0.8 else payload
            data = raw(header) + payload
            connection.feed(damaged(chance, data) if chance.random() < 0.2 else data)
            tried += 1
            if connection.closed or chance.random() < 0.1:
                connection = victim.connection()


@pytest.fixture
def victim() -> Iterator[Callable[..., Victim]]:
    made: list[Victim] = []

    def make(*what: Any) -> Victim:
        made.append(Victim(*what))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["bml", "exchange"])
def test_a_server_survives_fuzzed_frames(victim: Callable[..., Victim], algorithm: str) -> None:
    served = victim(None, algorithm)
    fuzz(served, 4, CASES["frames to a server"] // 2, learns=False)
    served.takes_an_honest_step()


@pytest.mark.slow
def test_a_learner_survives_fuzzed_frames_and_allocates_no_terabytes(victim: Callable[..., Victim]) -> None:
    served = victim(5)
    fuzz(served, 5, CASES["frames to a learner"], learns=True)
    served.takes_an_honest_step()


def test_a_learner_is_told_of_this_step_and_the_next_alone(victim: Callable[..., Victim]) -> None:
    served = victim(5)
    served.view(learns=True)
    step = served.core.step
    for ahead in range(1, 50):
        (header, text), *_ = served.honest()
        connection = served.connection()
        connection.feed(raw(header._replace(step=step + ahead)) + text)
        assert connection.closed is (ahead > 1)
    assert served.core._learner is not None
    assert len(served.core._learner._calls) == 1


def test_short_reads_of_a_header_are_frame_errors() -> None:
    with pytest.raises(FrameError, match="cut short"):
        unpack(bytes(HEADER_NBYTES - 1))
