"""The training state on its way to a joiner: every byte once, none lost, none damaged, from any donors."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bml.errors import StateMismatch
from bml.protocol.server.donor import Donor
from bml.protocol.server.events import SendState, SendText
from bml.protocol.server.transfer import Head, IncomingState, OutgoingPart, Part, cut, outgoing_state, verify
from bml.protocol.step.dataflow import Send
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.protocol.wire.messages import Incarnation, View
from bml.topology import parse
from bml.topology.errors import FabricError

ME, STEP = 9, 12


def piece(start: int, stop: int, step: int = STEP) -> Header:
    return Header(Kind.STATE, 3, step, 0, ME, 0, start, stop, stop - start)


def head_frame(step: int = STEP, origin: int = 0) -> Header:
    return Header(Kind.HEAD, 3, step, origin, ME, 0, 0, 10, 10)


def donated(state: bytes, parts: int, piece_nbytes: int) -> tuple[list[Head], list[tuple[Header, bytes]]]:
    heads, frames = [], []
    for number in range(parts):
        part = Part(number, parts, piece_nbytes)
        (head,), kept = cut(memoryview(state), [OutgoingPart(ME, 0, part)])
        heads.append(Head.decode(head.encode().decode()))
        at = 0
        for start, stop in part.pieces(len(state)):
            frames.append((piece(start, stop), bytes(kept[at : at + stop - start])))
            at += stop - start
        assert at == len(kept)
    return heads, frames


@pytest.mark.slow
@given(
    st.integers(0, 500),
    st.integers(1, 7),
    st.sampled_from([1, 3, 64, 1000]),
    st.randoms(use_true_random=False),
)
def test_all_parts_together_are_the_state(nbytes: int, parts: int, size: int, chance: random.Random) -> None:
    state = chance.randbytes(nbytes)
    heads, frames = donated(state, parts, size)
    assert sum(len(data) for _, data in frames) == nbytes
    incoming = IncomingState()
    assert [incoming.head(head_frame(), head) for head in heads] == [True] + [False] * (parts - 1)
    buffer = bytearray(incoming.nbytes)
    chance.shuffle(frames)
    for header, data in frames:
        assert not incoming.complete
        incoming.check(header)
        buffer[header.start : header.stop] = data
        incoming.arrived(header)
    assert incoming.complete
    assert bytes(buffer) == state
    verify(memoryview(buffer), incoming.digests)
    if nbytes:
        buffer[chance.randrange(nbytes)] ^= 1
        with pytest.raises(FabricError, match="damaged"):
            verify(memoryview(buffer), incoming.digests)


def test_it_is_not_complete_before_every_donor_has_spoken() -> None:
    heads, frames = donated(b"x" * 100, 3, 10)
    incoming = IncomingState()
    incoming.head(head_frame(), heads[0])
    for header, _ in frames:
        if header.start % 30 == 0:
            incoming.check(header)
            incoming.arrived(header)
    assert not incoming.complete


@pytest.mark.parametrize(
    "header", [piece(0, 20), piece(10, 20, step=STEP + 1), piece(200, 210), piece(5, 15), piece(0, 9)]
)
def test_a_piece_that_cannot_be_is_refused(header: Header) -> None:
    heads, _ = donated(b"x" * 100, 2, 10)
    incoming = IncomingState()
    incoming.head(head_frame(), heads[0])
    with pytest.raises(FrameError, match="is missing"):
        incoming.check(header)


def test_a_piece_comes_once() -> None:
    heads, _ = donated(b"x" * 100, 1, 10)
    incoming = IncomingState()
    incoming.head(head_frame(), heads[0])
    incoming.arrived(piece(0, 10))
    with pytest.raises(FrameError, match="is missing"):
        incoming.check(piece(0, 10))


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [100, 16 << 20, 50 << 20])
def test_donors_must_give_the_same_state(nbytes: int) -> None:
    state = bytearray(nbytes)
    heads, _ = donated(bytes(state), 2, nbytes // 3)
    again, _ = donated(bytes(state), 2, nbytes // 3)
    state[nbytes // 2 : nbytes // 2 + 20_000] = b"x" * 20_000
    for others in (bytes(state[:nbytes]), bytes(nbytes + 1)):
        incoming = IncomingState()
        incoming.head(head_frame(), heads[0])
        with pytest.raises(StateMismatch, match="server 1 has another training state after step 12"):
            incoming.head(head_frame(origin=1), donated(others, 2, nbytes // 3)[0][1])
        incoming.head(head_frame(origin=1), again[1])
        with pytest.raises(FrameError, match="again"):
            incoming.head(head_frame(), heads[0])
    with pytest.raises(FrameError, match="in 3 parts"):
        incoming.head(head_frame(origin=1), donated(bytes(nbytes), 3, nbytes // 3)[0][2])
    with pytest.raises(FrameError, match="its state of step 13"):
        incoming.head(head_frame(STEP + 1), heads[1])


@pytest.mark.parametrize("text", ["", "1 2", "a 0 1 4 abc", "-1 0 1 4 abc", "9 2 2 4 abc", "9 0 1 0 abc"])
def test_a_head_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(FrameError):
        Head.decode(text)


def test_every_link_of_a_joiner_brings_a_part() -> None:
    fabric = parse("bcube:3x2")
    view = View(4, fabric.servers, (), 7, "", 0.0, learners=(4,), joined=(Incarnation(4, 1),))
    outgoing = {server: outgoing_state(view, fabric, server, 64) for server in fabric.servers}
    donors = sorted(server for server, found in outgoing.items() if found)
    assert donors == sorted({*fabric.neighbours(4, 0), *fabric.neighbours(4, 1)})
    found = [part for server in donors for part in outgoing[server].parts]  # type: ignore[union-attr]
    assert sorted(part.part.number for part in found) == [0, 1, 2, 3]
    assert {part.part.parts for part in found} == {4}
    assert {(part.peer, part.part.piece_nbytes) for part in found} == {(4, 64)}


def test_learners_and_lost_links_give_nothing() -> None:
    fabric = parse("bcube:3x2").without("link:1/1")
    view = View(4, fabric.servers, ("link:1/1",), 7, "", 0.0, learners=(3, 4))
    outgoing = {server: outgoing_state(view, fabric, server, 64) for server in fabric.servers}
    to_4 = sorted(
        (server, part.level)
        for server, found in outgoing.items()
        if found
        for part in found.parts
        if part.peer == 4
    )
    assert to_4 == [(5, 0), (7, 1)]


def test_state_that_was_cut_for_an_earlier_view_does_not_use_up_that_of_the_next() -> None:
    """The state is cut while another view comes in force. The joiner would wait for ever."""
    fabric, state = parse("bcube:3x1"), memoryview(bytes(range(100)))
    donor = Donor(0, lambda nbytes: 16)

    def sent_by(epoch: int) -> SendState:
        joined = (Incarnation(2, 1),)
        donor.install(View(epoch, fabric.servers, (), 7, "", 0.0, learners=(2,), joined=joined), fabric)
        due = donor.due(8)
        assert due is not None
        return SendState(due, 8, cut(state, due.parts)[0])

    old, new = sent_by(4), sent_by(5)
    assert donor.send(old) == []
    assert donor.due(8) is new.outgoing
    head, *pieces = donor.send(new)
    assert isinstance(head, SendText)
    assert [each.header.epoch for each in (head, *pieces) if isinstance(each, Send | SendText)] == [5] * 5
    assert donor.due(8) is None, "it is given once"
    assert donor.send(new) == []


def test_nothing_is_due_before_a_step_of_the_view_is_committed() -> None:
    fabric = parse("bcube:3x1")
    donor = Donor(0, lambda nbytes: 16)
    view = View(4, fabric.servers, (), 7, "", 0.0, learners=(2,), joined=(Incarnation(2, 1),))
    donor.install(view, fabric)
    assert donor.due(7) is None
    assert donor.due(8) is not None
