"""Texts and control messages that nobody of ours would send: refused, or valid; see test_fuzz.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fuzzing import CASES, damaged

from bml.protocol.coordinator.core import Connected, Coordinator, From, Tick
from bml.protocol.server.transfer import MAX_PIECES, Head
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import MAX_CALL_NBYTES, Call
from bml.protocol.wire.frame import FrameError
from bml.protocol.wire.messages import Incarnation, MessageError, View
from bml.protocol.wire.validate import check_for_server, check_from_server
from bml.topology import parse
from bml.topology.errors import FabricError

pytestmark = pytest.mark.timeout(120)

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
    from bml.protocol.wire import call

    def none(*_: object) -> None:
        raise MemoryError("no")

    for name in ("zeros", "ones", "full"):
        monkeypatch.setattr(call.np, name, none)
    with pytest.raises(FabricError, match="no memory to follow allreduce"):
        call.neutral(Call(op, "<f8", 1 << 30, "allreduce"))


# --- control messages ------------------------------------------------------------------------------

FABRIC = parse("bcube:2x2")
INCARNATION = Incarnation(3, 9, "somewhere")
VIEW = View(
    2,
    (0, 1, 3),
    ("server:2",),
    4,
    "test",
    0.1,
    (("link:1/0", 1),),
    (3,),
    (INCARNATION,),
    rates=(msg.Rate(1, 1, 3, 2),),
)
TO_SERVER = (
    msg.Who(1), msg.Freeze(1, 3, "x"), msg.Propose(1, VIEW), msg.Install(1, 2), msg.Evict(1, 3, "x"),
    msg.Abort(1, "start", "x"), msg.Shutdown(1), msg.Inject("kill:1"),
    msg.Returned(1, 2, 9),
    msg.Noted(1),
)  # fmt: skip
STATUS = msg.Status(1, 7, 0, 2, VIEW, VIEW, 4, -1, "", "", None)
TO_COORDINATOR = (
    STATUS, msg.Accepted(1, 7, 2), msg.Refused(1, 7, 3), msg.Deposed(1, 2), msg.Withdraw(1, 0, 0),
    msg.Suspect(1, 0, 0, "silence", 0.5, "x"), msg.Healthy(1, 0, 0), msg.Relapsed(1, 0, 0),
    msg.Interrupted(1, 0, 0), msg.Held(1, 0, 0), msg.CanSendState(1),
    msg.CaughtUp(1, 2), msg.NeedsState(1, 2),
    msg.Leaves(1, "x"), msg.Progress(1, 9), msg.Ask(1), msg.Ended(1, "done", "", 9),
    msg.Inject("join:2"), msg.Measured(1, 2, ((0, 0, 90_000, 400_000), (3, 1, 70_000, 1))),
)  # fmt: skip


def test_no_kind_of_message_is_left_out() -> None:
    assert {type(message) for message in TO_SERVER} == {*msg.ToServer.__args__}
    assert {type(message) for message in TO_COORDINATOR} == {*msg.ToCoordinator.__args__}


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
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, joined=(Incarnation(9, 1),))),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, rates=(msg.Rate(1, 2, 1, 1),))),
        msg.Propose(1, View(2, (0, 1, 2, 3), ("link:1/0",), 0, "", 0.0, rates=(msg.Rate(1, 0, 1, 1),))),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, rates=(msg.Rate(1, 0, 6, 1),))),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, rates=(msg.Rate(1, 0, 1, 0),))),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, rates=(msg.Rate(1, 0, 1, 1),) * 2)),
        msg.Propose(1, View(2, (0, 1, 2, 3), (), 0, "", 0.0, joined=(Incarnation(1, 0),))),
        msg.Freeze(1, 2**32, ""),
        msg.Who(-1),
        msg.CanSendState(1),
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
        msg.Suspect(1, 0, 0, "stall", 0.5, "a third server loses", 2),
        msg.Leaves(2, "another"),
        msg.Measured(2, 1, ((0, 1, 9, 9),)),
        msg.Measured(1, 1, ((2, 0, 9, 9),)),
        msg.Measured(1, 1, ((0, 0, 9, 9), (77, 0, 9, 9))),
        msg.Measured(1, 1, ((0, 0, -1, 9),)),
        msg.Measured(1, 1, ((0, 0, 9, 0),)),
        msg.Measured(1, 2**32, ()),
        msg.Ended(3, "failed", "another", 4),
        STATUS.__class__(1, 7, 0, 2**32, None, None, 0, -1, "", "", None),
        STATUS.__class__(1, 7, 0, 2, None, None, 0, -1, "", "", Incarnation(2, 1)),
        msg.Freeze(1, 2, ""),
    ],
)
def test_what_a_server_does_not_say(message: msg.Message) -> None:
    with pytest.raises(MessageError):
        check_from_server(message, 1, FABRIC)
