"""More than 100,000 messages that nobody of ours would send: refused, dropped, or valid; never a crash.

Everything is drawn from fixed seeds. What is fuzzed is the real thing up to the socket: handshakes, beats,
control messages, and whole connections into a server (its core, its memory, its shell) that is in the middle
of a step, or that learns. Afterwards that server must take an honest step, exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from bml.cluster.job import Contact, JobSpec
from bml.cluster.loop import ServerLoop
from bml.cluster.server import Server
from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.call import MAX_CALL_NBYTES, Call
from bml.protocol.coordinator import Connected, Coordinator, From, Tick
from bml.protocol.frame import _LAYOUT, HEADER_NBYTES, MAGIC, VERSION, FrameError, Header, Kind, unpack
from bml.protocol.messages import Life, MessageError, View
from bml.protocol.plausible import check_for_server, check_from_server
from bml.protocol.timeouts import Timeouts
from bml.protocol.transfer import MAX_PIECES, Head
from bml.train.communicator import Committed
from bml.transport.auth import (
    HANDSHAKE_NBYTES,
    AcceptorHandshake,
    Beat,
    DialerHandshake,
    Hello,
    Role,
    open_beat,
    seal_beat,
)
from bml.transport.intake import Intake
from bml.transport.sendqueue import Counters
from topology import parse
from topology.errors import FabricError

pytestmark = pytest.mark.timeout(120)

#: How many cases each test tries; together more than 100,000.
CASES = {
    "handshakes": 20_000,
    "beats": 10_000,
    "headers": 30_000,
    "frames to a server": 30_000,
    "frames to a learner": 30_000,
    "control messages": 20_000,
    "texts": 10_000,
}
EDGES = (0, 1, 2, 5, 9, 10, 11, 255, 4096, 4097, 2**16 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def test_there_are_enough_cases() -> None:
    assert sum(CASES.values()) >= 100_000


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut off, doubled, moved or made up; now and then none."""
    how = chance.randrange(8)
    changed = bytearray(data)
    if how <= 2:
        for _ in range(chance.randrange(1, 4)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
    elif how == 3:
        del changed[chance.randrange(len(changed) + 1) :]
    elif how == 4:
        at = chance.randrange(len(changed) + 1)
        changed[at:at] = chance.randbytes(chance.randrange(1, 40))
    elif how == 5:
        changed += changed[: chance.randrange(len(changed) + 1)]
    elif how == 6:
        changed = bytearray(chance.randbytes(chance.randrange(300)))
    return bytes(changed)


# --- who comes in ----------------------------------------------------------------------------------


def test_handshakes_without_the_token_never_succeed() -> None:
    chance = random.Random(1)
    me, other = Hello(Role.DATA, b"job", 5, 1), Hello(Role.DATA, b"job", 2, 1, 3)
    for _ in range(CASES["handshakes"]):
        token, wrong = b"token", chance.choice((b"", b"token ", b"Token", chance.randbytes(16)))
        nonce = chance.randbytes(32)
        attacker = DialerHandshake(wrong or b"?", other, chance.randbytes(32))
        victim: AcceptorHandshake | DialerHandshake = AcceptorHandshake(token, me, nonce)
        challenge = victim.start()
        attacker.start()
        said = attacker.feed(challenge)
        if chance.random() < 0.5:
            server = AcceptorHandshake(wrong or b"?", me, chance.randbytes(32))
            said = server.start() + server.feed(said)
            victim = DialerHandshake(token, other, nonce, 5, 0)
            victim.start()
        stream = damaged(chance, said)
        taken = 0
        while stream and victim.wants_nbytes:
            part, stream = stream[: victim.wants_nbytes], stream[victim.wants_nbytes :]
            victim.feed(part)
            taken += len(part)
        assert not victim.done
        assert victim.peer is None
        assert taken <= HANDSHAKE_NBYTES


def test_datagrams_without_the_token_are_no_beats() -> None:
    chance = random.Random(2)
    for _ in range(CASES["beats"]):
        beat = Beat(chance.choice(EDGES) & 0xFFFFFFFF, 2, 0, chance.choice(EDGES))
        assert open_beat(b"token", b"job", seal_beat(b"Token", b"job", beat)) is None
        good = seal_beat(b"token", b"job", beat)
        data = damaged(chance, good)
        assert (open_beat(b"token", b"job", data) == beat) is (data == good)


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


def test_headers_are_read_or_refused() -> None:
    chance = random.Random(3)
    good = Header(Kind.UP, 3, 7, 0, 1, 77, 0, 5, 40)
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

    def __init__(self, life: int | None, algorithm: str = "bml") -> None:
        self.spec = JobSpec("bcube:2x1", algorithm, job="fuzzed", token=b"token")
        self.server = Server(self.spec, ME, ["127.78.0.2"], life=life)
        peer = Contact(PEER, ("127.78.0.1", 9), (("127.78.0.1", 9),))
        self.loop = self.server._loop
        self.loop.execution.contacts = {PEER: peer, ME: self.server.contact}
        self.joined = () if life is None else (Life(ME, life, self.server.contact.encode()),)
        self.core = self.loop.core
        self.epoch = 0

    def close(self) -> None:
        self.loop.close()

    def control(self, message: msg.ToServer) -> None:
        self.loop.execution.execute(self.core.handle(ev.Control(message), 0.0))

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
        self.loop.meeting.contribution = (np.ones(n), "sum")
        call = Call("sum", "<f8", n, "sum")
        event = ev.Submit(self.core.step, self.core.epoch, call, SIGNATURE)
        self.loop.execution.execute(self.core.handle(event, 0.0))

    def header(self, kind: Kind, start: int = 0, stop: int = 0, nbytes: int | None = None) -> Header:
        itemsize = 8 if kind <= Kind.DOWN else 1
        length = (stop - start) * itemsize if nbytes is None else nbytes
        step = self.core.step - (kind >= Kind.HEAD)
        return Header(kind, self.core.epoch, step, PEER, ME, SIGNATURE, start, stop, length)

    def honest(self) -> list[tuple[Header, bytes]]:
        """The frames of server 0, who brings twos."""
        text = Call("sum", "<f8", N, "sum").encode()
        if self.spec.algorithm == "exchange":
            sums = [(self.header(Kind.UP, 0, N), np.full(N, 2.0).tobytes())]
        else:
            sums = [
                (self.header(Kind.UP, 5, N), np.full(5, 2.0).tobytes()),
                (self.header(Kind.DOWN, 0, 5), np.full(5, 3.0).tobytes()),
            ]
        return [(self.header(Kind.DESCRIBE, 0, len(text)), text), *sums, (self.header(Kind.TOKEN), b"")]

    def state(self) -> list[tuple[Header, bytes]]:
        """Some of a joiner's state."""
        text = Head(100, Head.decode("100 0 1 40 x").part, "x").encode()
        head = (self.header(Kind.HEAD, 0, len(text)), text)
        pieces = [
            (self.header(Kind.STATE, a, min(a + 40, 100)), bytes(min(40, 100 - a))) for a in (0, 40, 80)
        ]
        return [head, *pieces]

    def connection(self) -> Connection:
        return Connection(self.loop)

    def takes_an_honest_step(self) -> None:
        """Nothing of what came before is in it."""
        self.view(learns=False)
        while not self.loop.meeting.replies.empty():
            self.loop.meeting.replies.get()
        self.submit()
        connection = self.connection()
        for header, payload in self.honest():
            connection.feed(raw(header) + payload)
        reply = self.loop.meeting.replies.get(timeout=1.0)
        assert isinstance(reply, Committed), reply
        np.testing.assert_array_equal(reply.result, np.full(N, 3.0))


class Connection:
    """The receiving half of a connection to the victim; a FrameError closes it."""

    def __init__(self, loop: ServerLoop) -> None:
        self.closed = False
        self._intake = Intake(
            partial(loop.admit, PEER, 0), partial(loop.received, PEER, 0), Counters(), 64 << 20
        )

    def feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not self.closed and not self._intake.paused:
            for buffer in self._intake.buffers():
                take = min(len(buffer), len(rest))
                buffer[:take] = rest[:take]
                rest = rest[take:]
                try:
                    self._intake.advance(take)
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


@pytest.mark.parametrize("algorithm", ["bml", "exchange"])
def test_a_server_survives_fuzzed_frames(victim: Callable[..., Victim], algorithm: str) -> None:
    served = victim(None, algorithm)
    fuzz(served, 4, CASES["frames to a server"] // 2, learns=False)
    served.takes_an_honest_step()


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


# --- texts -----------------------------------------------------------------------------------------


def test_texts_are_read_or_refused() -> None:
    chance = random.Random(6)
    good = ("sum <f4 301\nallreduce float32 301", "100 0 4 40 0123456789abcdef")
    words = (
        "sum", "<f4", "-1", "1e9", "9" * 5000, str(10**30), "٣", "<O8", "f4,f4", "(9,)f8", "M8[s]", "0x10",
        "", "a", ",", "<f16", ">f4", "|S9", "\0", "1_0", "\ud7ff", "100", "0", "1",
    )  # fmt: skip
    for _ in range(CASES["texts"]):
        if chance.random() < 0.5:
            text = damaged(chance, chance.choice(good).encode()).decode(errors="replace")
        else:
            text = chance.choice((" ", "\n", "  ")).join(chance.choices(words, k=chance.randrange(1, 7)))
        for read, check in ((Call.decode, sane_call), (Head.decode, sane_head)):
            try:
                found = read(text)
            except FrameError:
                continue
            check(found)  # type: ignore[operator]


@pytest.mark.parametrize("head", [f"{(MAX_PIECES << 2) + 1} 0 1 4 x", f"{10**30} 0 1 1 x", "-1 0 1 4 x"])
def test_states_in_too_many_pieces(head: str) -> None:
    with pytest.raises(FrameError):
        Head.decode(head)


@pytest.mark.parametrize("n", [MAX_CALL_NBYTES // 4 + 1, 10**30, -1])
def test_calls_of_too_many_elements(n: int) -> None:
    assert Call.decode(f"sum <f4 {MAX_CALL_NBYTES // 4}\nx").n_elements == MAX_CALL_NBYTES // 4
    with pytest.raises(FrameError):
        Call.decode(f"sum <f4 {n}\nx")


def sane_call(call: Call) -> None:
    assert 0 <= call.n_elements * call.itemsize <= MAX_CALL_NBYTES
    assert np.dtype(call.dtype).str == call.dtype


def sane_head(head: Head) -> None:
    assert 0 <= head.nbytes <= MAX_PIECES * head.part.piece_nbytes


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_a_call_for_which_there_is_no_memory_ends_the_learner_in_words(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bml.protocol import call

    def none(*_: object) -> None:
        raise MemoryError("no")

    for name in ("zeros", "ones", "full"):
        monkeypatch.setattr(call.np, name, none)
    with pytest.raises(FabricError, match="no memory to follow allreduce"):
        call.neutral(Call(op, "<f8", 1 << 30, "allreduce"))


# --- control messages ------------------------------------------------------------------------------

FABRIC = parse("bcube:2x2")
LIFE = Life(3, 9, "somewhere")
VIEW = View(2, (0, 1, 3), ("server:2",), 4, "test", 0.1, (("link:1/0", 1),), (3,), (LIFE,))
TO_SERVER = (
    msg.Who(1), msg.Freeze(1, 3, "x"), msg.Propose(1, VIEW), msg.Install(1, 2), msg.Evict(1, 3, "x"),
    msg.Abort(1, "start", "x"), msg.Shutdown(1), msg.Inject("kill:1"),
)  # fmt: skip
STATUS = msg.Status(1, 7, 0, 2, VIEW, VIEW, 4, -1, "", "", None)
TO_COORDINATOR = (
    STATUS, msg.Accepted(1, 7, 2), msg.Refused(1, 7, 3), msg.Deposed(1, 2), msg.Withdraw(1, 0, 0),
    msg.Suspect(1, 0, 0, "silence", 0.5, "x"), msg.Healthy(1, 0, 0), msg.Relapsed(1, 0, 0), msg.Gives(1),
    msg.CaughtUp(1, 2), msg.Leaves(1, "x"), msg.Progress(1, 9), msg.Ended(1, "done", ""),
    msg.Inject("join:2"),
)  # fmt: skip


def coordinator() -> Coordinator:
    """In the middle of its work: every server has said where it stands."""
    made = Coordinator(FABRIC, 7, Timeouts.of(0.5), None, 0.0)
    for server in FABRIC.servers:
        made.handle(Connected(server), 0.0)
        made.handle(From(server, STATUS.__class__(server, 7, 0, 0, None, None, 0, -1, "", "", None)), 0.0)
    return made


def test_control_messages_are_read_or_refused() -> None:
    chance = random.Random(7)
    desk = coordinator()
    told = 0
    for number in range(CASES["control messages"]):
        sent = chance.choice(TO_SERVER + TO_COORDINATOR)
        data = damaged(chance, msg.encode(sent))
        try:
            message = msg.decode(data)
            if chance.random() < 0.5:
                check_for_server(message, FABRIC)
                continue
            check_from_server(message, 1, FABRIC)
        except MessageError:
            continue
        told += 1
        desk.handle(From(1, message), number * 0.01)  # type: ignore[arg-type]
        desk.handle(Tick(), number * 0.01)
        if desk.state == "stopped" or told % 50 == 0:
            desk = coordinator()
    assert told > 500


@pytest.mark.parametrize(
    "message",
    [
        msg.Propose(1, View(2, (0, 1), (), 0, "", 0.0)),
        msg.Propose(1, View(2, (0, 1, 2, 3), ("server:9",), 0, "", 0.0)),
        msg.Propose(1, View(2, (0, 1, 2, 3), ("nonsense",), 0, "", 0.0)),
        msg.Propose(1, View(2, (0, 3), ("server:1", "server:2"), 0, "", 0.0)),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), -1, "", 0.0)),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, learners=(0, 1, 2, 3))),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, joined=(Life(9, 1),))),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, joined=(Life(1, 0),))),
        msg.Freeze(1, 2**32, ""),
        msg.Who(-1),
        msg.Gives(1),
    ],
)
def test_what_no_coordinator_says(message: msg.Message) -> None:
    with pytest.raises(MessageError):
        check_for_server(message, FABRIC)


@pytest.mark.parametrize(
    "message",
    [
        msg.Suspect(0, 1, 0, "silence", 0.0, "in the name of another"),
        msg.Suspect(1, 2, 0, "silence", 0.0, "no neighbour"),
        msg.Suspect(1, 1, 0, "silence", 0.0, "itself"),
        msg.Suspect(1, 0, 9, "silence", 0.0, "no level"),
        msg.Suspect(1, 77, 0, "silence", 0.0, "no server"),
        msg.Leaves(2, "another"),
        msg.Ended(3, "failed", "another"),
        STATUS.__class__(1, 7, 0, 2**32, None, None, 0, -1, "", "", None),
        STATUS.__class__(1, 7, 0, 2, None, None, 0, -1, "", "", Life(2, 1)),
        msg.Freeze(1, 2, ""),
    ],
)
def test_what_a_server_does_not_say(message: msg.Message) -> None:
    with pytest.raises(MessageError):
        check_from_server(message, 1, FABRIC)


def test_short_reads_of_a_header_are_frame_errors() -> None:
    with pytest.raises(FrameError, match="cut short"):
        unpack(bytes(HEADER_NBYTES - 1))
