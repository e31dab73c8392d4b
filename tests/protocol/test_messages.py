"""Control messages survive the wire; anything else is a MessageError and nothing worse."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bml.protocol.wire import messages as msg
from bml.topology.errors import FabricError

VIEW = msg.View(
    4,
    (0, 2),
    ("server:1", "link:0/1"),
    17,
    "server 1 is dead: gone",
    0.25,
    (("link:0/1", 2),),
    rates=(msg.Rate(2, 0, 3, 1),),
)
ALL: list[msg.Message] = [
    msg.Who(1),
    msg.Freeze(1, 4, "why"),
    msg.Propose(1, VIEW),
    msg.Install(1, 4),
    msg.Evict(1, 4, "why"),
    msg.Abort(1, "training", "Traceback", 3),
    msg.Abort(1, "too-few", "only 1"),
    msg.Shutdown(1),
    msg.Inject("kill:1@t=0s"),
    msg.Status(2, 1, 4, 4, None, VIEW, 16, 17, "", ""),
    msg.Status(2, 1, 0, 4, VIEW, VIEW, 16, -1, "failed", "Traceback ü"),
    msg.Accepted(2, 1, 4),
    msg.Refused(2, 1, 5),
    msg.Deposed(2, 9),
    msg.Suspect(2, 1, 0, "silence", 0.7, "nothing heard"),
    msg.Suspect(2, 1, 0, "stall", 0.7, "nothing acknowledged", 1),
    msg.Withdraw(2, 1, 0),
    msg.Healthy(2, 1, 0),
    msg.Relapsed(2, 1, 0),
    msg.Interrupted(2, 1, 0),
    msg.Held(2, 1, 0),
    msg.Measured(2, 4, ((1, 0, 90_000, 400_000),)),
    msg.CanSendState(2),
    msg.CaughtUp(2, 7),
    msg.NeedsState(2, 7),
    msg.Leaves(2, "it was asked to"),
    msg.Progress(2, 99),
    msg.Ask(2),
    msg.Ended(2, "done", "", 7),
    msg.Returned(1, 2, 7),
    msg.Noted(1),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_round_trip(message: msg.Message) -> None:
    assert msg.decode(msg.encode(message)) == message


def test_no_kind_of_message_is_left_out() -> None:
    assert {type(message) for message in ALL} == {*msg.ToServer.__args__, *msg.ToCoordinator.__args__}


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(msg.MessageError):
        msg.decode(data)


def test_damaged_messages_are_refused_or_still_well_formed() -> None:
    chance = random.Random(1)
    refused = 0
    for _ in range(20_000):
        data = bytearray(msg.encode(chance.choice(ALL)))
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            assert isinstance(msg.decode(bytes(data)), msg.ToServer | msg.ToCoordinator)
        except msg.MessageError:
            refused += 1
    assert refused > 5_000


def test_two_messages_in_one_are_refused() -> None:
    with pytest.raises(msg.MessageError):
        msg.decode(msg.encode(ALL[0]) * 2)


def test_text_that_is_no_utf8_is_refused() -> None:
    """Found by the fuzz above: it was a UnicodeDecodeError, which would have ended the server's loop."""
    with pytest.raises(msg.MessageError):
        msg.decode(msg.encode(msg.Ended(2, "done", "", 7)).replace(b"done", b"don\xcf"))


def test_deep_nesting_is_refused() -> None:
    unknown_field = b"\x83" + msg.encode(msg.Who(1))[1:] + b"\xa1x" + b"\x91" * 100_000 + b"\x00"
    with pytest.raises(msg.MessageError):
        msg.decode(unknown_field)


def test_the_error_is_the_environments() -> None:
    with pytest.raises(FabricError, match="malformed control message"):
        msg.decode(b"\xc1")
