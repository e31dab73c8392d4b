"""The inputs of a core in a flat list: a code, then the fields, none of which the garbage collector visits.

A server takes tens of thousands of inputs a second. Objects that stay for a while are looked at by the
collector again and again; numbers, texts and bytes are not. So the frequent inputs lie field by field in one
list. Most of them are frames, each of which is packed: a dozen numbers that stay would push what a step needs
out of the processor's cache. The others are few, and immutable: they lie there as they are, and become plain
data when they are written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from bml.faults.stalls import Flow
from bml.protocol.record.values import RecordingError, plain, value_of
from bml.protocol.server.core import ServerCore
from bml.protocol.server.events import Instruction, Submit
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import Header, Kind
from bml.topology.errors import BmlError

RECEIVED, ADMITTED, SUBMITTED, EVENT, SHARED, HEARD, FLOWS, FRAME = range(8)
"""RECEIVED: peer, text, now, header, of a frame with a text. FRAME: the same of others, packed. ADMITTED:
header, of those that may change something. SUBMITTED: now, step, epoch, signature, call. EVENT, SHARED: now,
event. HEARD: peer, level, now. FLOWS: now, how many, for each peer, level and the fields of Flow."""

_FIELDS = {RECEIVED: 12, ADMITTED: 9, SUBMITTED: 8, EVENT: 2, SHARED: 2, HEARD: 3, FLOWS: 2, FRAME: 1}
# now, peer, and the header: kind, epoch, step, origin, dest, signature, start, stop, nbytes
_PACKED = struct.Struct("<dHBIQHHIQQI")
pack_frame = _PACKED.pack
"""Pack the time, the peer and the fields of a header."""
_FLOW = 2 + len(Flow._fields)

Input = tuple[Any, ...]
"""A code and its fields, as above."""


def each_input(log: list[Any]) -> Iterator[Input]:
    """The inputs of a flat list, one after the other. Raises RecordingError."""
    at, end = 0, len(log)
    while at < end:
        try:
            code = log[at]
            after = at + 1 + _FIELDS[code]
            if code == FLOWS:
                after += _FLOW * log[at + 2]
        except (KeyError, TypeError, IndexError):
            raise RecordingError(f"damaged: {log[at]!r:.40} begins no input") from None
        if not at < after <= end:
            raise RecordingError("damaged: its last input is cut short")
        yield tuple(log[at:after])
        at = after


def written(log: list[Any]) -> list[Any]:
    """The flat list with its events as plain data, ready for msgpack."""
    done: list[Any] = []
    for each in each_input(log):
        done += (*each[:2], plain(each[2])) if each[0] in (EVENT, SHARED) else each
    return done


def read_log(data: list[Any]) -> list[Any]:
    """The flat list of data that was `written`. Raises RecordingError."""
    done: list[Any] = []
    for each in each_input(data):
        done += (*each[:2], value_of(each[2])) if each[0] in (EVENT, SHARED) else each
    return done


def time_of(given: Input, before: float) -> float:
    """When an input came, by the server's clock; `before`: when the one before came."""
    code = given[0]
    if code == ADMITTED:
        return before
    if code == FRAME:
        return float(_PACKED.unpack(given[1])[0])
    return float(given[3] if code in (RECEIVED, HEARD) else given[1])


def give(core: ServerCore, given: Input) -> list[Instruction] | BmlError:
    """Give an input to a core, as its shell did; returns its instructions, or the error that it raised."""
    try:
        return _give(core, given)
    except BmlError as error:
        return error


def _give(core: ServerCore, given: Input) -> list[Instruction]:
    code, *rest = given
    if code == RECEIVED:
        peer, text, now, kind, *fields = rest
        return core.received(peer, Header(Kind(kind), *fields), text, now)
    if code == FRAME:
        now, peer, kind, *fields = _PACKED.unpack(rest[0])
        return core.received(peer, Header(Kind(kind), *fields), "", now)
    if code == ADMITTED:
        kind, *fields = rest
        header = Header(Kind(kind), *fields)
        core.admit(header.origin, header)
        return []
    if code == SUBMITTED:
        now, step, epoch, signature, *call = rest
        return core.handle(Submit(step, epoch, Call(*call), signature), now)
    if code == EVENT:
        return core.handle(rest[1], rest[0])
    if code == SHARED:
        return core.handle_shared(rest[1], rest[0])
    if code == HEARD:
        core.heard(*rest)
        return []
    now, _, *flat = rest
    each = [flat[at : at + _FLOW] for at in range(0, len(flat), _FLOW)]
    core.flows({(peer, level): Flow(*flow) for peer, level, *flow in each}, now)
    return []
