"""Only who has the token, for this job and this level, gets in; everybody else gets a reason."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bml.transport.auth import (
    BEAT_NBYTES,
    HANDSHAKE_NBYTES,
    AcceptorHandshake,
    Beat,
    DialerHandshake,
    Hello,
    Role,
    job_bytes,
    open_beat,
    seal_beat,
)
from topology.errors import UsageError

TOKEN = b"token"
ACCEPTOR = Hello(Role.DATA, b"job", 5, 1)
DIALER = Hello(Role.DATA, b"job", 2, 1)


def acceptor(token: bytes = TOKEN, me: Hello = ACCEPTOR, nonce: bytes = b"a" * 32) -> AcceptorHandshake:
    return AcceptorHandshake(token, me, nonce)


def dialer(
    token: bytes = TOKEN, me: Hello = DIALER, nonce: bytes = b"d" * 32, expect: int | None = 5
) -> DialerHandshake:
    return DialerHandshake(token, me, nonce, expect)


def converse(one: AcceptorHandshake, other: DialerHandshake, chunk: int = 1000) -> None:
    """Carry the bytes both ways in chunks until nobody has anything to say."""
    to_other, to_one = one.start(), other.start()
    while (to_other and other.wants_nbytes) or (to_one and one.wants_nbytes):
        take = min(chunk, other.wants_nbytes)
        to_other, data = to_other[take:], to_other[:take]
        to_one += other.feed(data) if data else b""
        take = min(chunk, one.wants_nbytes)
        to_one, data = to_one[take:], to_one[:take]
        to_other += one.feed(data) if data else b""


@given(st.integers(1, 200), st.binary(min_size=1), st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 1))
def test_both_sides_learn_who_the_other_is(chunk: int, token: bytes, server: int, level: int) -> None:
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


def test_dialer_wants_a_certain_server() -> None:
    other = dialer(expect=6)
    converse(acceptor(), other)
    assert not other.done
    assert "server 5 answered instead of server 6" in other.error


def test_other_version() -> None:
    one, other = acceptor(), dialer()
    challenge = bytearray(one.start())
    challenge[4] = 9
    other.start()
    other.feed(bytes(challenge))
    assert "version" in other.error
    answer = one.feed(b"BMLh\x09")
    assert "version" in one.error
    assert answer


def test_garbage_is_noticed_at_its_first_bytes() -> None:
    one = acceptor()
    one.start()
    assert one.feed(b"GE") == b""
    assert "not a handshake" in one.error


def test_a_dialer_without_the_token_cannot_replay() -> None:
    recorded = acceptor(nonce=b"1" * 32)
    good = dialer()
    good.start()
    answer = good.feed(recorded.start())
    again = acceptor(nonce=b"2" * 32)
    again.start()
    again.feed(answer)
    assert again.error == "wrong token"


def test_an_acceptor_cannot_echo() -> None:
    one, other = acceptor(), dialer()
    other.start()
    hello = other.feed(one.start())
    other.feed(hello)
    assert not other.done
    assert other.error


@pytest.mark.parametrize("side", [acceptor, dialer])
def test_fuzzed_bytes_never_crash_or_authenticate(side: type) -> None:
    rng = random.Random(7)
    one, other = acceptor(), dialer()
    other.start()
    hello = other.feed(one.start())
    valid = {acceptor: [hello], dialer: [one.start(), one.feed(hello)]}[side]
    for _ in range(3000):
        machine = side(nonce=rng.randbytes(32))
        machine.start()
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
    one.start()
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
def test_beats_round_trip(server: int, dest: int, level: int, sequence: int) -> None:
    beat = Beat(server, dest, level, sequence)
    datagram = seal_beat(TOKEN, b"job", beat)
    assert len(datagram) == BEAT_NBYTES
    assert open_beat(TOKEN, b"job", datagram) == beat
    assert open_beat(TOKEN, b"other", datagram) is None
    assert open_beat(b"other", b"job", datagram) is None


def test_fuzzed_beats() -> None:
    rng = random.Random(3)
    good = seal_beat(TOKEN, b"job", Beat(1, 2, 0, 5))
    for _ in range(2000):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        assert open_beat(TOKEN, b"job", bytes(data)) is None
        assert open_beat(TOKEN, b"job", rng.randbytes(rng.randrange(200))) is None
