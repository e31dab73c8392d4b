"""Zero-copy sends between servers of one host: payloads that are referred to, sent, refused."""

from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest
from descriptors import opened
from wires import JOB, TOKEN, Recorder, Wires, header

from bml.protocol.wire.frame import FrameError, Reference, pack, pack_reference, unpack, unpack_reference
from bml.sharedmem import segment
from bml.sharedmem.zero_copy import LEAST_NBYTES, ZeroCopy
from bml.transport import WAIT, Kind

pytestmark = pytest.mark.skipif(bool(segment.why_not()), reason=segment.why_not() or "it can")

LONG = 2 * LEAST_NBYTES


class Neighbours(Wires):
    """Servers of one host; `strangers` know no other registration page, and no other server knows theirs."""

    def __init__(self, strangers: tuple[int, ...] = (), nbytes: int = 16 * LONG):
        self.zero_copies: list[ZeroCopy] = []
        super().__init__(servers=2, nbytes=nbytes)
        pages = {each: one.address for each, one in enumerate(self.zero_copies) if each not in strangers}
        for server, zero_copy in enumerate(self.zero_copies):
            zero_copy.meet({} if server in strangers else pages)
        self.connect()

    def make(self, server: int, handler: Recorder, **options: Any) -> Any:
        self.zero_copies.append(ZeroCopy(TOKEN, JOB, server, 2))
        return super().make(server, handler, zero_copy=self.zero_copies[-1], **options)

    def array(self, nbytes: int = LONG, server: int = 0) -> Any:
        found = self.zero_copies[server].pool.empty(nbytes, np.uint8)
        found[:] = np.arange(nbytes) % 251
        return found

    def send(self, start: int, array: Any, **how: Any) -> None:
        payload = memoryview(array)
        self.transports[0].send(1, 0, header(start=start, stop=start + len(payload), **how), payload)

    def got(self, n_frames: int) -> bytes:
        there = self.handlers[1]
        self.until(lambda: len(there.frames) == n_frames, f"{n_frames} frames")
        return bytes(there.memory)

    def moved(self) -> tuple[int, int]:
        """Bytes of zero-copy sends: as server 0 counts them, and as server 1 does."""
        referenced = self.transports[0].stats()[1, 0].nbytes_zero_copy_sent
        return referenced, self.transports[1].stats()[0, 0].nbytes_zero_copy_received


def test_a_long_payload_of_the_pool_is_read_where_it_lies() -> None:
    with Neighbours() as wires:
        x = wires.array()
        wires.send(0, x)
        assert wires.got(1)[:LONG] == x.tobytes()
        assert wires.moved() == (LONG, LONG)
        assert wires.transports[0].stats()[1, 0].nbytes_sent < 100
        assert wires.zero_copies[0].partners == (1,)
        assert wires.transports[1].stats()[0, 0].nbytes_copied_received == LONG, (
            "it is not read in place here"
        )


def test_a_payload_that_is_read_in_place_is_not_copied() -> None:
    with Neighbours() as wires:
        x, seen = wires.array(), []

        def read_in_place(header: Any, referenced: memoryview) -> bool:
            seen.append(bytes(referenced))
            return True

        wires.zero_copies[1].read_in_place = read_in_place
        wires.send(0, x)
        wires.got(1)
        assert seen == [x.tobytes()]
        assert wires.moved() == (LONG, LONG)
        assert wires.transports[1].stats()[0, 0].nbytes_copied_received == 0


@pytest.mark.parametrize("which", ["short", "foreign"])
def test_what_is_short_or_lies_elsewhere_is_sent(which: str) -> None:
    with Neighbours() as wires:
        x = wires.array(LEAST_NBYTES - 1) if which == "short" else np.full(LONG, 7, np.uint8)
        wires.send(0, x)
        assert wires.got(1)[: len(x)] == x.tobytes()
        assert wires.moved() == (0, 0)


@pytest.mark.parametrize("stranger", [0, 1])
def test_a_pair_sends_references_only_if_both_can_read(stranger: int) -> None:
    with Neighbours(strangers=(stranger,)) as wires:
        x = wires.array()
        wires.send(0, x)
        assert wires.got(1)[:LONG] == x.tobytes()
        assert wires.moved() == (0, 0)


def test_references_and_sent_frames_mix_beyond_a_turn() -> None:
    """More than is received in one turn, with long payloads behind that are sent."""
    with Neighbours(nbytes=200 * LONG) as wires:
        x, foreign = wires.array(), np.full(LONG, 7, np.uint8)
        for number in range(200):
            wires.send(number * LONG, foreign if number % 3 == 1 else x)
        memory = wires.got(200)
        for number in range(200):
            part = memory[number * LONG : (number + 1) * LONG]
            assert part == (foreign if number % 3 == 1 else x).tobytes(), number
        assert not wires.handlers[1].losses


def test_what_was_fenced_before_it_was_read_is_never_received() -> None:
    with Neighbours() as wires:
        there = wires.handlers[1]
        there.verdict = lambda header: WAIT
        wires.send(0, wires.array())
        wires.until(lambda: there.admitted, "a frame that waits")
        wires.transports[0].fence()
        there.verdict = None
        wires.transports[1].resume()
        wires.send(LONG, wires.array())
        wires.got(1)
        assert [frame.start for _, _, frame in there.frames] == [LONG]
        assert wires.moved() == (2 * LONG, LONG)


def test_a_frame_that_waits_is_read_when_it_need_not_wait() -> None:
    with Neighbours() as wires:
        there = wires.handlers[1]
        there.verdict = lambda header: WAIT
        x = wires.array()
        wires.send(0, x)
        wires.until(lambda: there.admitted, "a frame that waits")
        there.verdict = None
        wires.transports[1].resume()
        assert wires.got(1)[:LONG] == x.tobytes()


@pytest.mark.parametrize(
    "reference", [Reference(0, 0, 1 << 40), Reference(9, 0, 0), Reference(0, 0, (64 << 20) - LONG + 1)]
)
def test_a_reference_to_memory_that_does_not_exist_ends_the_connection(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wrong = ZeroCopy.reference_for, list[Reference]()
    monkeypatch.setattr(ZeroCopy, "reference_for", lambda *arguments: wrong[0] if wrong else real(*arguments))
    with Neighbours() as wires:
        x = wires.array()
        wires.send(0, x)
        wires.got(1)
        wrong.append(reference)
        wires.send(0, x)
        wires.until(lambda: wires.handlers[1].losses, "the loss")
        assert wires.handlers[1].losses[0][2] == "malformed"


def test_memory_that_cannot_be_mapped_ends_the_connection_and_then_all_is_sent() -> None:
    with Neighbours() as wires:
        x = wires.array()
        wires.zero_copies[0].pool.close()  # no process can open it any more
        wires.send(0, x)
        wires.until(lambda: wires.handlers[1].losses, "the loss")
        assert "cannot be mapped" in wires.handlers[1].losses[0][3]
        pages = {server: zero_copy.address for server, zero_copy in enumerate(wires.zero_copies)}
        for zero_copy in wires.zero_copies:
            zero_copy.meet(pages)
        wires.until(lambda: wires.handlers[0].losses, "the loss on the other side")
        wires.connect()
        wires.send(0, x)
        assert wires.got(1)[:LONG] == x.tobytes()
        assert wires.moved() == (LONG, 0)


def test_a_registration_page_without_the_token_of_another_host_or_missing_is_not_used() -> None:
    own, other = ZeroCopy(TOKEN, JOB, 0, 2), ZeroCopy(b"another token", JOB, 1, 2)
    good = ZeroCopy(TOKEN, JOB, 1, 2)
    wrong = [
        other.address,
        good.address._replace(boot="elsewhere"),
        good.address._replace(namespace=1),
        good.address._replace(fd=0),
        good.address._replace(fd=1 << 20),
        good.address._replace(nonce=5),
        good.address._replace(nbytes=1 << 30),
    ]
    try:
        good.meet({0: own.address})
        for address in wrong:
            own.meet({1: address})
            assert (own.partners, good.partners) == ((), ()), address
        own.meet({1: good.address})
        assert (own.partners, good.partners) == ((1,), (0,))
        own.meet({})
        assert (own.partners, good.partners) == ((), ())
    finally:
        for each in (own, other, good):
            each.close()


@pytest.mark.slow
def test_descriptors_are_given_back() -> None:
    gc.collect()
    before = opened()
    with Neighbours() as wires:
        wires.send(0, wires.array())
        wires.got(1)
    del wires
    gc.collect()
    assert opened() <= before


def test_a_reference_frame_is_read_back_and_nothing_else_is_one() -> None:
    one, reference = header(start=3, stop=3 + LONG), Reference(2, 7, 4096)
    frame = pack_reference(pack(one), reference)
    assert unpack_reference(frame) == (one, reference)
    with pytest.raises(FrameError):
        unpack(frame)
    token = pack_reference(pack(header(Kind.TOKEN)), reference)
    for wrong in (frame[:-1], pack(one) + bytes(16), token, struct.pack(">4s", b"BML\xf2") + bytes(60)):
        with pytest.raises(FrameError):
            unpack_reference(wrong)
    with pytest.raises(FrameError):
        unpack_reference(frame, max_nbytes=LONG - 1)


@pytest.mark.slow
def test_memory_that_the_pool_dropped_is_shown_and_mapped_no_more() -> None:
    """Vectors that grow: one piece of memory after the other, and what is read is what was sent."""

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("/memfd:bml" in line for line in maps)

    with Neighbours(nbytes=16 << 20) as wires:
        wires.transports[0].send(1, 0, header(start=0, stop=LONG), memoryview(wires.array()))
        wires.got(1)
        before = mapped()
        for number in range(1, 60):
            n = int(LONG * 1.085**number)
            x = wires.array(n)
            x[0] = number % 256
            wires.send(0, x)
            assert wires.got(number + 1)[:n] == x.tobytes()
            del x
        assert mapped() <= before
        assert wires.moved() == (wires.moved()[0],) * 2
        assert not wires.handlers[1].losses


@pytest.mark.slow
def test_a_fenced_reference_to_memory_that_is_gone_ends_no_connection() -> None:
    with Neighbours(nbytes=64 << 20) as wires:
        there = wires.handlers[1]
        there.verdict = lambda header: WAIT
        wires.send(0, wires.array())
        wires.until(lambda: there.admitted, "a frame that waits")
        wires.transports[0].fence()
        gc.collect()
        larger = wires.array(32 << 20)  # in the place of the segment that was referred to
        there.verdict = None
        wires.transports[1].resume()
        wires.send(LONG, larger[:LONG])
        wires.got(1)
        assert [frame.start for _, _, frame in there.frames] == [LONG]
        assert not there.losses
