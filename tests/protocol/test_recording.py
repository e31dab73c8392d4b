"""The flight recorder's parts: values, the ring, the file, and what is said of damaged ones."""

from __future__ import annotations

import hashlib
import random
import struct
import threading
import zlib
from collections import deque
from typing import Any

import msgspec
import pytest

from bml.errors import TrainingError
from bml.faults.stalls import Flow
from bml.protocol.record import recorded, tape
from bml.protocol.record import state as record_state
from bml.protocol.record.inputs import (
    EVENT,
    FLOWS,
    FRAME,
    RECEIVED,
    each_input,
    pack_frame,
    read_log,
    time_of,
    written,
)
from bml.protocol.record.recorded import RecordedCore
from bml.protocol.record.recording import MAGIC, pack, pack_part, unpack
from bml.protocol.record.replay import replay
from bml.protocol.record.setup import Setup, making, new_core
from bml.protocol.record.state import difference, set_state, state_of
from bml.protocol.record.tape import Tape
from bml.protocol.record.values import RecordingError, plain, value_of
from bml.protocol.server import events as ev
from bml.protocol.server.history import ViewRecord
from bml.protocol.server.transfer import Head, Part
from bml.protocol.step.direct import Stage
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind
from bml.schedule.select.model import DEFAULTS
from bml.topology import parse
from bml.topology.errors import InvariantError

VIEW = msg.View(1, (0, 1, 2), (), 0, "start", 0.0, joined=(msg.Incarnation(2, 7, "{}"),))
VALUES = [
    None, True, -3, 2.5, float("inf"), "a", b"b", (), (1, (2, "x")), [1, [2]], {3: (1,), 1: "b"},
    {(2, 1), (1, 2)}, frozenset({"a", "b"}), deque([1.5, 2.0], maxlen=4), Stage.DONE, Kind.TOKEN, VIEW,
    ev.Control(msg.Propose(0, VIEW)),
    Header(Kind.REDUCE, 1, 2, 3, 4, 5, 6, 7, 8), Head(9, Part(0, 1, 4), "ab", "cd"), Flow(True, 1, 2, 3, 0.5),
    ev.Tell(msg.Suspect(0, 1, 0, "silence", 0.5, "why")),
]  # fmt: skip
SETUP = Setup(1, "bcube:2x2", "auto", DEFAULTS, False, Timeouts.of(), 1 << 20, 1.25e9)


def core() -> RecordedCore:
    made = making(SETUP)
    return RecordedCore(*new_arguments(made))


def new_arguments(made: Any) -> tuple[Any, ...]:
    return (
        1,
        parse(SETUP.fabric),
        made.planner,
        SETUP.timeouts,
        made.slice_nbytes,
        0.0,
        None,
        SETUP.kept_nbytes,
    )


def driven(n_ticks: int = 50, seed: int = 1) -> RecordedCore:
    """A server that got a view, and then ticks and heartbeats at random times."""
    chance, made, now = random.Random(seed), core(), 0.0
    view = msg.View(1, (0, 1, 2, 3), (), 0, "start", 0.0)
    for message in (msg.Who(0), msg.Freeze(0, 1, "start"), msg.Propose(0, view), msg.Install(0, 1)):
        made.handle(ev.Control(message), now)
    for _ in range(n_ticks):
        now += chance.uniform(0.01, 0.2)
        made.heard(0, 0, now)
        made.flows({(0, 0): Flow(True, chance.randrange(9), 0)}, now)
        made.handle(ev.Tick(), now)
    return made


def file_of(made: RecordedCore) -> bytes:
    return pack("job", SETUP.fabric, "0", [pack_part(SETUP, "end", 9.0, made.recording())])


@pytest.mark.parametrize("value", VALUES)
def test_values_come_back_equal(value: Any) -> None:
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(plain(value)))
    back = value_of(data)
    assert back == value
    assert type(back) is type(value)
    assert plain(back) == plain(value)


def test_an_error_comes_back_with_its_text() -> None:
    back = value_of(plain(TrainingError("server 1 raised", 1)))
    assert (type(back), str(back), back.server) == (TrainingError, "server 1 raised", 1)


def test_equal_sets_are_equal_bytes_in_any_order() -> None:
    names = [f"link:{server}/0" for server in range(50)]
    assert plain(frozenset(names)) == plain(frozenset(reversed(names)))


@pytest.mark.parametrize(
    "data",
    [["o", "os:system", "true"], ["o", "builtins:eval", "1"], ["?"], [], [["t"]], {"a": 1}, ["d", 1],
     ["e", "bml.protocol.step.direct:Stage", 99], ["o", "bml.protocol.wire.messages:Who"],
     ["v", "bml.faults.stalls:Flow", 3]],
)  # fmt: skip
def test_data_that_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises(RecordingError, match="damaged"):
        value_of(data)


def test_a_class_that_is_not_known_is_not_written() -> None:
    with pytest.raises(TypeError, match="no class that a recording holds"):
        plain(object())


def test_inputs_come_back_as_they_were() -> None:
    header = Header(Kind.TOKEN, 1, 2, 3, 1, 9, 0, 0, 0)
    log: list[Any] = [
        FRAME,
        pack_frame(1.25, 3, *header),
        RECEIVED,
        3,
        "",
        1.5,
        *header,
        EVENT,
        1.75,
        ev.Prepared(4),
        FLOWS,
        2.0,
        1,
        0,
        0,
        *Flow(True, 1, 0),
    ]
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(written(log)))
    assert read_log(data) == log
    assert [given[0] for given in each_input(log)] == [FRAME, RECEIVED, EVENT, FLOWS]
    assert [time_of(given, 0.0) for given in each_input(log)] == [1.25, 1.5, 1.75, 2.0]


@pytest.mark.parametrize(
    "log", [[99, 1, 2], [RECEIVED, 1], [FLOWS, 1.0, 3, 1], [FLOWS, 1.0, -9, 1], ["a"], [None]]
)
def test_lists_that_are_no_inputs_are_refused(log: list[Any]) -> None:
    with pytest.raises(RecordingError, match="damaged"):
        list(each_input(log))


def test_the_ring_keeps_the_last_two_segments_and_those_where_something_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tape, "MOST_KEPT", 3)
    ring = Tape(b"0")
    numbers = []
    for number in range(1, 12):
        ring.log.append(number)
        if number in (3, 8):
            ring.mark()
        ring.turn(str(number).encode())
        numbers.append([each.number for each in ring.segments()])
    assert numbers[:4] == [[0, 1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert numbers[-1] == [6, 7, 10, 11], "the oldest are given up first"
    assert [each.log for each in ring.segments()] == [[7], [8], [11], []]
    assert [each.state for each in ring.segments()] == [b"6", b"7", b"10", b"11"]


def test_a_state_is_set_and_is_bit_equal() -> None:
    state = state_of(driven())
    other = new_core(SETUP, making(SETUP))
    assert difference(state_of(other), state) == "core._term is -1, recorded 0"
    set_state(other, state)
    assert state_of(other) == state


def test_an_overflown_ring_replays_from_the_states_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_ENTRIES", 100)
    (server,) = unpack(file_of(driven(400))).servers
    assert server.segments[-1].number > len(server.segments)
    done = replay(server)
    assert done.equal
    assert len({state.digest for state in done.checked}) == len(done.checked) > 2


def test_another_input_or_state_differs() -> None:
    (server,) = unpack(file_of(driven())).servers
    log = server.segments[-1].log
    heard = next(each for each in range(len(log)) if log[each : each + 3] == [5, 0, 0])
    changed = [*log[:heard], *log[heard + 4 :]]
    wrong = msgspec.structs.replace(server, segments=(server.segments[-1]._replace(log=changed),))
    done = replay(wrong)
    assert not done.equal
    assert "detector" in done.checked[-1].differs


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"", "no recording of bml"),
        (lambda data: b"PK\x03\x04 something else", "no recording of bml"),
        (lambda data: data.replace(b"recording 2", b"recording 9"), "'BML recording 9', and this bml reads"),
        (lambda data: data[: len(MAGIC) + 10], "cut short"),
        (lambda data: data[:-1], "cut short"),
        (lambda data: data + b"x", "damaged"),
        (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "check sum"),
    ],
)
def test_damaged_and_foreign_files_are_refused(damage: Any, says: str) -> None:
    with pytest.raises(RecordingError, match=says):
        unpack(damage(file_of(driven(5))))


def signed(body: bytes) -> bytes:
    """A file with a right check sum, whatever is in it."""
    return MAGIC + struct.pack(">Q32s", len(body), hashlib.sha256(body).digest()) + body


def test_files_with_a_right_check_sum_and_odd_contents_are_refused() -> None:
    part = pack_part(SETUP, "end", 9.0, driven(5).recording())
    raw = zlib.decompress(part[16:])
    chance, refused = random.Random(5), 0
    for _ in range(300):
        odd = bytearray(raw)
        for _ in range(chance.choice((1, 1, 3))):
            odd[chance.randrange(len(odd))] = chance.randrange(256)
        file = pack("job", SETUP.fabric, "0", [part[:16] + zlib.compress(odd)])
        try:
            refused += not all(replay(server).equal for server in unpack(file).servers)
        except RecordingError:
            refused += 1
    assert refused > 200, "the others changed a text, or a number that does not matter"
    with pytest.raises(RecordingError, match="damaged"):
        unpack(signed(b"nothing"))


def test_a_part_that_would_unpack_to_too_much_is_refused() -> None:
    body = msgspec.msgpack.encode(
        {"job": "j", "fabric": "f", "version": "0", "parts": [struct.pack(">IIQ", 0, 0, 1 << 40)]}
    )
    with pytest.raises(RecordingError, match="1099511627776 bytes"):
        unpack(signed(body))


def test_an_error_of_the_recorder_ends_the_recorder_and_not_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> bytes:
        raise TypeError("no class that a recording holds")

    monkeypatch.setattr(tape, "MOST_ENTRIES", 100)
    made = driven(5)
    monkeypatch.setattr(recorded, "state_of", fails)
    for tick in range(200):
        made.heard(0, 0, 2.0 + tick)
        assert isinstance(made.handle(ev.Tick(), 2.0 + tick), list)
    # A server of another test may still live in a thread of its own, and end its recorder here, too.
    here = [each.message for each in caplog.records if each.thread == threading.get_ident()]
    assert here == ["server 1 records no more: TypeError: no class that a recording holds"]
    assert len(made._tape.log) < 300
    with pytest.raises(InvariantError, match="the flight recorder has ended: TypeError"):
        made.recording()
    assert core().handle(ev.Tick(), 0.0) == [], "one whose first state fails works, too"


def test_a_ring_turns_without_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_ENTRIES", 100)
    made = driven(5)
    for heard in range(100):
        made.heard(0, 0, 2.0 + heard / 1000)
    assert len(made._tape.log) >= 400
    made.received(0, Header(Kind.TOKEN, 1, 1, 0, 1, 9, 0, 0, 0), "", 2.1)
    assert len(made._tape.log) == 2, "a frame begins the next segment"
    for ready in range(1000):
        made.handle(ev.CanSendState(), 3.0 + ready)
        assert len(made._tape.log) < 210
    (server,) = unpack(file_of(made)).servers
    assert server.segments[-1].number > 10
    assert replay(server).equal


@pytest.mark.slow
def test_bytes_of_a_view_are_made_once_for_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    made, written_views = driven(), []
    history = made._view_history
    for epoch in range(2, 600):
        view = msg.View(epoch, tuple(range(64)), (), epoch, "came", 0.0)
        history.frozen(float(epoch))
        history.installed(view, epoch + 0.5)
        history.committed(epoch + 0.75)
    as_plain = plain(history.records)

    def counted(value: Any) -> Any:
        written_views.extend([value] if isinstance(value, ViewRecord) else [])
        return plain(value)

    monkeypatch.setattr(record_state, "plain", counted)
    first = state_of(made)
    assert len(written_views) == 599
    assert record_state.read(first)["history"]["records"] == as_plain
    history.frozen(700.0)
    history.installed(VIEW, 701.0)
    state_of(made)
    history.committed(702.0)
    last = state_of(made)
    assert len(written_views) == 601, "the new view, and again with the time that recovery took"
    other = new_core(SETUP, making(SETUP))
    set_state(other, last)
    assert other._view_history.records == history.records
    assert state_of(other) == last
