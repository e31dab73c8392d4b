"""Only a dialer with the token, for this job and level, is accepted; every other gets a reason."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bml.topology.errors import UsageError
from bml.transport.handshake.auth import (
    _IDENTITY,
    HANDSHAKE_NBYTES,
    AcceptorHandshake,
    DialerHandshake,
    Hello,
    Refusal,
    Role,
    job_bytes,
)
from bml.transport.handshake.sealing import HEARTBEAT_NBYTES, Heartbeat, open_heartbeat, seal_heartbeat

TOKEN = b"token"
ACCEPTOR = Hello(Role.DATA, b"job", 5, 1)
DIALER = Hello(Role.DATA, b"job", 2, 1)


HERE, THERE = ("127.0.0.5", 5000), ("127.0.0.2", 2000)
"""Where the acceptor and the dialer are."""


def acceptor(token: bytes = TOKEN, me: Hello = ACCEPTOR, nonce: bytes = b"a" * 32) -> AcceptorHandshake:
    return AcceptorHandshake(token, me, nonce)


def dialer(
    token: bytes = TOKEN, me: Hello = DIALER, nonce: bytes = b"d" * 32, expect: int = 5, incarnation: int = 0
) -> DialerHandshake:
    return DialerHandshake(token, me, nonce, expect, incarnation)


def converse(one: AcceptorHandshake, other: DialerHandshake, chunk: int = 1000) -> None:
    """Carry the bytes both ways in chunks until no side has more to send."""
    to_other, to_one = one.start(HERE, THERE), other.start(THERE, HERE)
    while (to_other and other.wants_nbytes) or (to_one and one.wants_nbytes):
        take = min(chunk, other.wants_nbytes)
        to_other, data = to_other[take:], to_other[:take]
        to_one += other.feed(data) if data else b""
        take = min(chunk, one.wants_nbytes)
        to_one, data = to_one[take:], to_one[:take]
        to_other += one.feed(data) if data else b""


@given(st.integers(1, 200), st.binary(min_size=1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_both_sides_learn_the_identity_of_the_other(
    chunk: int, token: bytes, server: int, level: int
) -> None:
    me = Hello(Role.CONTROL, b"j" * 64, server, level)
    one = acceptor(token, me._replace(server=9))
    other = dialer(token, me, expect=9)
    converse(one, other, chunk)
    assert one.done, one.error
    assert other.done, other.error
    assert one.peer == me
    assert other.peer == me._replace(server=9)
    assert one.wants_nbytes == other.wants_nbytes == 0


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (acceptor(b"another"), dialer(), "wrong token"),
        (acceptor(), dialer(b"another"), "wrong token"),
        (acceptor(), dialer(me=DIALER._replace(job=b"other job")), "wrong job"),
        (acceptor(), dialer(me=DIALER._replace(level=0)), "level"),
        (acceptor(), dialer(me=DIALER._replace(role=Role.CONTROL)), "kind of connection"),
        (acceptor(), dialer(expect=6), "another server"),
        (acceptor(), dialer(incarnation=7), "another incarnation"),
        (acceptor(me=ACCEPTOR._replace(incarnation=7)), dialer(), "another incarnation"),
    ],
)
def test_refused_with_a_reason_on_both_sides(
    one: AcceptorHandshake, other: DialerHandshake, why: str
) -> None:
    converse(one, other)
    assert not one.done
    assert not other.done
    assert why in one.error
    assert why in other.error


LATER = ACCEPTOR._replace(incarnation=7)
ELSEWHERE = ("127.0.0.5", 5001)


@pytest.mark.parametrize(
    ("victim", "here", "there"),
    [
        (ACCEPTOR._replace(server=6), HERE, THERE),
        (ACCEPTOR._replace(server=2), HERE, THERE),  # the dialer itself
        (LATER, HERE, THERE),
        (ACCEPTOR._replace(level=0), HERE, THERE),
        (ACCEPTOR._replace(role=Role.CONTROL), HERE, THERE),
        (ACCEPTOR._replace(job=b"another"), HERE, THERE),
        (ACCEPTOR, ELSEWHERE, THERE),
        (ACCEPTOR, ("127.0.0.6", HERE[1]), THERE),
        (ACCEPTOR, ("::7f00:5", HERE[1]), THERE),
        (ACCEPTOR, HERE, (THERE[0], 2001)),
        (ACCEPTOR, HERE, ("127.0.0.6", THERE[1])),
    ],
)
def test_what_a_dialer_says_opens_no_other_door(
    victim: Hello, here: tuple[str, int], there: tuple[str, int]
) -> None:
    """Somebody sits where the dialer expects server 5, and relays byte by byte to another listener."""
    one, other = acceptor(me=victim), dialer()
    to_other, _ = one.start(here, there), other.start(THERE, HERE)
    answer = one.feed(other.feed(to_other))
    assert not one.done
    assert one.peer is None
    assert one.error != "wrong token", "the proof itself is right, it is for another server"
    other.feed(answer)
    assert not other.done


class Credulous(AcceptorHandshake):
    """An acceptor with the token that accepts every dialer."""

    def _judge(self, claim: object) -> Refusal:
        return Refusal.OK


class Forgetful(Credulous):
    """Does not say to whom it answers."""

    def _take(self, message: bytes) -> bytes:
        self.start(HERE, THERE)
        answer = super()._take(message)
        identity = bytearray(answer[: _IDENTITY.size])
        identity[_IDENTITY.size - 40] ^= 1  # the last byte of the dialer's server number
        return bytes(identity) + self._mac(b"acceptor", self._challenge, message, bytes(identity))


@pytest.mark.parametrize(
    ("one", "here", "why"),
    [
        (Credulous(TOKEN, ACCEPTOR._replace(server=6), b"a" * 32), HERE, "instead of server 5"),
        (Credulous(TOKEN, LATER, b"a" * 32), HERE, "another incarnation"),
        (Credulous(TOKEN, ACCEPTOR._replace(level=0), b"a" * 32), HERE, "as another job"),
        (Credulous(TOKEN, ACCEPTOR._replace(role=Role.CONTROL), b"a" * 32), HERE, "as another job"),
        (Credulous(TOKEN, ACCEPTOR._replace(job=b"another"), b"a" * 32), HERE, "as another job"),
        (Credulous(TOKEN, ACCEPTOR, b"a" * 32), ELSEWHERE, "different addresses"),
        (Forgetful(TOKEN, ACCEPTOR, b"a" * 32), HERE, "answered another server"),
    ],
)
def test_a_dialer_checks_what_the_acceptor_proves(
    one: AcceptorHandshake, here: tuple[str, int], why: str
) -> None:
    other = dialer()
    challenge, _ = one.start(here, THERE), other.start(THERE, HERE)
    other.feed(one.feed(other.feed(challenge)))
    assert not other.done
    assert why in other.error


@pytest.mark.parametrize(
    ("port", "dials", "taken"),
    [
        (Role.DATA, Role.PROBE, True),
        (Role.CONTROL, Role.PROBE, False),
        (Role.DATA, Role.CONTROL, False),
        (Role.PROBE, Role.DATA, False),
    ],
)
def test_a_data_port_takes_probes_and_no_other_port_does(port: Role, dials: Role, taken: bool) -> None:
    one = AcceptorHandshake(TOKEN, ACCEPTOR._replace(role=port), b"a" * 32)
    other = DialerHandshake(
        TOKEN, DIALER._replace(role=dials), b"b" * 32, ACCEPTOR.server, ACCEPTOR.incarnation
    )
    challenge, _ = one.start(HERE, THERE), other.start(THERE, HERE)
    other.feed(one.feed(other.feed(challenge)))
    assert (one.done, other.done) == (taken, taken)
    if taken:
        assert one.peer is not None
        assert one.peer.role is dials


def test_both_ways_to_write_an_address_are_one() -> None:
    """A listener for IPv6 may see IPv4 dialers; a scope is each host's own."""
    one, other = acceptor(), dialer()
    challenge = one.start(("::ffff:127.0.0.5", 5000), ("fe80::1%eth0", 1))
    other.start(("fe80::1%7", 1), HERE)
    other.feed(one.feed(other.feed(challenge)))
    assert other.done, other.error


def test_other_version() -> None:
    one, other = acceptor(), dialer()
    challenge = bytearray(one.start(HERE, THERE))
    challenge[4] = 9
    other.start(THERE, HERE)
    other.feed(bytes(challenge))
    assert "version" in other.error
    answer = one.feed(b"BMLh\x09")
    assert "version" in one.error
    assert answer


def test_garbage_is_noticed_at_its_first_bytes() -> None:
    one = acceptor()
    one.start(HERE, THERE)
    assert one.feed(b"GE") == b""
    assert "not a handshake" in one.error


def test_a_dialer_without_the_token_cannot_replay() -> None:
    recorded = acceptor(nonce=b"1" * 32)
    good = dialer()
    good.start(THERE, HERE)
    answer = good.feed(recorded.start(HERE, THERE))
    again = acceptor(nonce=b"2" * 32)
    again.start(HERE, THERE)
    again.feed(answer)
    assert again.error == "wrong token"


@pytest.mark.parametrize("again", [acceptor(), acceptor(me=ACCEPTOR._replace(server=6)), acceptor(me=LATER)])
def test_a_recorded_handshake_opens_nothing_later(again: AcceptorHandshake) -> None:
    recorded, good = acceptor(nonce=b"1" * 32), dialer()
    good.start(THERE, HERE)
    said = good.feed(recorded.start(HERE, THERE))
    answer = recorded.feed(said)
    assert recorded.done
    again.start(HERE, THERE)
    again.feed(said)
    assert again.error == "wrong token"
    later = dialer(nonce=b"e" * 32)
    later.start(THERE, HERE)
    later.feed(recorded._challenge)
    later.feed(answer)
    assert later.error == "the other side does not have the token"


def test_an_acceptor_cannot_echo() -> None:
    one, other = acceptor(), dialer()
    other.start(THERE, HERE)
    hello = other.feed(one.start(HERE, THERE))
    other.feed(hello)
    assert not other.done
    assert other.error


@pytest.mark.parametrize("side", [acceptor, dialer])
def test_fuzzed_bytes_never_crash_or_authenticate(side: type) -> None:
    rng = random.Random(7)
    one, other = acceptor(), dialer()
    other.start(THERE, HERE)
    hello = other.feed(one.start(HERE, THERE))
    valid = {acceptor: [hello], dialer: [one.start(HERE, THERE), one.feed(hello)]}[side]
    for _ in range(3000):
        machine = side(nonce=rng.randbytes(32))
        machine.start(HERE, THERE)
        stream = bytearray(b"".join(valid) if rng.random() < 0.7 else rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(1, 4)):
            if stream:
                stream[rng.randrange(len(stream))] = rng.randrange(256)
        total = 0
        while stream and machine.wants_nbytes:
            take = rng.randrange(1, machine.wants_nbytes + 1)
            machine.feed(bytes(stream[:take]))
            del stream[:take]
            total += take
        assert not machine.done
        assert total <= HANDSHAKE_NBYTES


def test_more_than_asked_for_is_an_error() -> None:
    one = acceptor()
    one.start(HERE, THERE)
    one.feed(b"BMLh\x01" + bytes(1000))
    assert one.error


@pytest.mark.parametrize("job", ["", "x" * 65, "ä" * 33])
def test_bad_jobs(job: str) -> None:
    with pytest.raises(UsageError):
        job_bytes(job)


def test_empty_token_and_short_nonce() -> None:
    with pytest.raises(UsageError, match="token"):
        acceptor(token=b"")
    with pytest.raises(UsageError, match="nonce"):
        acceptor(nonce=b"short")


U32 = st.integers(0, 2**32 - 1)


@given(U32, U32, st.integers(0, 2**16 - 1), st.integers(0, 2**64 - 1))
def test_heartbeats_round_trip(server: int, dest: int, level: int, sequence: int) -> None:
    heartbeat = Heartbeat(server, dest, level, sequence, dest, sequence)
    datagram = seal_heartbeat(TOKEN, b"job", heartbeat)
    assert len(datagram) == HEARTBEAT_NBYTES
    assert open_heartbeat(TOKEN, b"job", datagram) == heartbeat
    assert open_heartbeat(TOKEN, b"other", datagram) is None
    assert open_heartbeat(b"other", b"job", datagram) is None


def test_fuzzed_heartbeats() -> None:
    rng = random.Random(3)
    good = seal_heartbeat(TOKEN, b"job", Heartbeat(1, 2, 0, 5))
    for _ in range(2000):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        assert open_heartbeat(TOKEN, b"job", bytes(data)) is None
        assert open_heartbeat(TOKEN, b"job", rng.randbytes(rng.randrange(200))) is None
