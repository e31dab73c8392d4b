"""Headers are read back as they were written, and other bytes are refused."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bml.protocol.wire.frame import HEADER_NBYTES, MAX_NBYTES, FrameError, Header, Kind, pack, unpack
from bml.topology.errors import FabricError, InvariantError

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(Kind))
    start = draw(st.integers(0, 2**63))
    span = draw(st.integers(int(kind == Kind.STATE), 4096))
    stop = 0 if kind == Kind.TOKEN else start + span
    itemsize = draw(st.sampled_from([1, 2, 4, 8])) if kind <= Kind.BROADCAST else 1
    nbytes = 0 if kind == Kind.TOKEN else span * itemsize
    return Header(kind, draw(U32), draw(U64), draw(U16), draw(U16), draw(U32), start, stop, nbytes)


@given(headers(), st.binary(max_size=9))
def test_round_trip_at_any_offset(header: Header, before: bytes) -> None:
    packed = pack(header)
    assert len(packed) == HEADER_NBYTES
    assert unpack(memoryview(before + packed), len(before)) == header


@given(headers(), st.integers(0, HEADER_NBYTES - 1), st.integers(1, 255))
def test_a_damaged_byte_is_noticed_or_gives_another_sane_header(header: Header, at: int, flip: int) -> None:
    damaged = bytearray(pack(header))
    damaged[at] ^= flip
    try:
        other = unpack(damaged)
    except FrameError:
        return
    assert other != header
    assert at >= 5, "magic and version are fixed, the kind may be another"
    assert pack(other) == damaged


@given(headers(), st.integers(0, HEADER_NBYTES - 1))
def test_cut_short(header: Header, nbytes: int) -> None:
    with pytest.raises(FrameError, match="cut short"):
        unpack(pack(header)[:nbytes])


def test_garbage_never_crashes() -> None:
    rng = random.Random(20)
    prefix = pack(Header(0, 1, 1, 0, 1, 7, 0, 4, 16))[:6]
    for round_ in range(4000):
        # Half of it looks like ours at first, or no field behind the magic would ever be looked at.
        data = (prefix if round_ % 2 else b"") + rng.randbytes(rng.randrange(HEADER_NBYTES + 20))
        try:
            header = unpack(data)
        except FrameError:
            continue
        assert pack(header) == data[:HEADER_NBYTES]


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (Header(6, 1, 1, 0, 1, 7, 0, 4, 16), "unknown kind"),
        (Header(Kind.REDUCE, 1, 1, 0, 1, 7, 4, 0, 16), "do not fit"),
        (Header(Kind.REDUCE, 1, 1, 0, 1, 7, 0, 3, 16), "do not fit"),
        (Header(Kind.BROADCAST, 1, 1, 0, 1, 7, 3, 3, 1), "do not fit"),
        (Header(Kind.TOKEN, 1, 1, 0, 1, 7, 3, 0, 1), "token"),
        (Header(Kind.TOKEN, 1, 1, 0, 1, 7, 3, 3, 0), "token"),
        (Header(Kind.DESCRIBE, 1, 1, 0, 1, 7, 0, 4097, 4097), "at most 4096"),
        (Header(Kind.DESCRIBE, 1, 1, 0, 1, 7, 0, 4, 5), "text"),
        (Header(Kind.HEAD, 1, 1, 0, 1, 7, 0, 4097, 4097), "at most 4096"),
        (Header(Kind.STATE, 1, 1, 0, 1, 7, 0, 4, 5), "bytes of state"),
        (Header(Kind.STATE, 1, 1, 0, 1, 7, 4, 4, 0), "bytes of state"),
        (Header(Kind.REDUCE, 1, 1, 0, 1, 7, 0, 1, MAX_NBYTES + 1), "at most"),
    ],
)
def test_insane_fields(header: Header, match: str) -> None:
    with pytest.raises(FrameError, match=match) as caught:
        unpack(pack(header))
    assert isinstance(caught.value, FabricError)


def test_limit_of_the_receiver() -> None:
    packed = pack(Header(Kind.REDUCE, 1, 1, 0, 1, 7, 0, 100, 400))
    assert unpack(packed, max_nbytes=400).nbytes == 400
    with pytest.raises(FrameError, match="at most 399"):
        unpack(packed, max_nbytes=399)


def test_other_version_and_magic() -> None:
    packed = bytearray(pack(Header(Kind.REDUCE, 1, 1, 0, 1, 7, 0, 1, 4)))
    struct.pack_into(">B", packed, 4, 2)
    with pytest.raises(FrameError, match="version 2"):
        unpack(packed)
    packed[:4] = b"HTTP"
    with pytest.raises(FrameError, match="magic"):
        unpack(packed)


def test_our_own_header_must_fit() -> None:
    with pytest.raises(InvariantError, match="does not fit"):
        pack(Header(Kind.REDUCE, 1, 1, 70000, 1, 7, 0, 1, 4))
