"""A recording: what the recorders of a job's servers held, as one file.

    "BML recording 2\n"   the format and its version
    length                of the rest in bytes, 8 bytes, big-endian
    sha256                of the rest, 32 bytes
    the rest              msgpack: job, fabric, version of bml, and the packed part of each server
    packed part           server, incarnation, length when unpacked, 16 bytes; then zlib of msgpack: settings,
                          segments, last state

It holds no parameters, gradients or training state, and not the job's token.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from bml.protocol.record.inputs import read_log, written
from bml.protocol.record.recorded import Taken
from bml.protocol.record.setup import Setup
from bml.protocol.record.tape import Segment
from bml.protocol.record.values import RecordingError

MAGIC = b"BML recording 2\n"
_MAKER = b"BML recording "
_HEAD = struct.Struct(">Q32s")
_PART = struct.Struct(">IIQ")
_MOST_NBYTES = 1 << 30
"""Longest unpacked part of a server."""


class _Segment(Struct, frozen=True, array_like=True):
    number: int
    state: bytes
    log: list[Any]


class _Part(Struct, frozen=True):
    setup: Setup
    why: str
    taken_at_s: float
    segments: list[_Segment]
    state: bytes


class _File(Struct, frozen=True):
    job: str
    fabric: str
    version: str
    parts: list[bytes]


_decode_part = msgspec.msgpack.Decoder(_Part).decode
_decode_file = msgspec.msgpack.Decoder(_File).decode


class ServerRecording(Struct, frozen=True):
    """The recording of one server, and the `state` at its end.

    `why` it was taken, and when, on the server's clock.
    """

    setup: Setup
    why: str
    taken_at_s: float
    segments: tuple[Segment, ...]
    state: bytes

    @property
    def who(self) -> tuple[int, int]:
        """The server, and the number of its incarnation (0: the first)."""
        return _who(self.setup)


class Recording(Struct, frozen=True):
    """The recordings of a job's servers; `version`: that of bml."""

    job: str
    fabric: str
    version: str
    servers: tuple[ServerRecording, ...]


def pack_part(setup: Setup, why: str, taken_at_s: float, taken: Taken) -> bytes:
    """Pack the recording of one server; takes some 10 ms a segment."""
    segments = [_Segment(each.number, each.state, written(each.log)) for each in taken.segments]
    raw = msgspec.msgpack.encode(_Part(setup, why, taken_at_s, segments, taken.state))
    return _PART.pack(*_who(setup), len(raw)) + zlib.compress(raw, 1)


def who_of(part: bytes) -> tuple[int, int]:
    """The server of a packed part, and the number of its incarnation."""
    server, incarnation, _ = _PART.unpack_from(part)
    return server, incarnation


def _who(setup: Setup) -> tuple[int, int]:
    return setup.server, setup.incarnation.number if setup.incarnation else 0


def pack(job: str, fabric: str, version: str, parts: Iterable[bytes]) -> bytes:
    """The file of these packed parts."""
    body = msgspec.msgpack.encode(_File(job, fabric, version, [*parts]))
    return MAGIC + _HEAD.pack(len(body), hashlib.sha256(body).digest()) + body


def unpack(data: bytes) -> Recording:
    """Read a file. Raises RecordingError, which says what is wrong with it."""
    if not data.startswith(_MAKER):
        raise RecordingError("this is no recording of bml: `bml run --record FILE` makes one")
    if not data.startswith(MAGIC):
        found = data[: len(MAGIC)].decode(errors="replace").strip()
        raise RecordingError(f"this is a '{found}', and this bml reads '{MAGIC.decode().strip()}'")
    head, body = data[len(MAGIC) : len(MAGIC) + _HEAD.size], data[len(MAGIC) + _HEAD.size :]
    if len(head) < _HEAD.size:
        raise RecordingError(f"the recording is cut short: it ends after {len(data)} bytes")
    length, expected = _HEAD.unpack(head)
    if len(body) < length:
        raise RecordingError(f"the recording is cut short: {len(body)} of {length} bytes are there")
    if len(body) > length or hashlib.sha256(body).digest() != expected:
        raise RecordingError("the recording is damaged: its check sum is wrong")
    try:
        file = _decode_file(body)
        parts = sorted((_unpack_part(part) for part in file.parts), key=lambda part: part.who)
    except (msgspec.MsgspecError, struct.error, zlib.error, ValueError, RecursionError) as error:
        raise RecordingError(f"the recording is damaged: {error}") from None
    return Recording(file.job, file.fabric, file.version, tuple(parts))


def _unpack_part(part: bytes) -> ServerRecording:
    _, _, length = _PART.unpack_from(part)
    if length > _MOST_NBYTES:
        raise RecordingError(f"the recording is damaged: a server's part has {length} bytes")
    unpacking = zlib.decompressobj()
    raw = unpacking.decompress(part[_PART.size :], length + 1)
    if len(raw) != length or not unpacking.eof:
        raise RecordingError(f"the recording is damaged: {len(raw)} of {length} bytes of a server's part")
    read = _decode_part(raw)
    segments = tuple(Segment(each.number, each.state, read_log(each.log)) for each in read.segments)
    return ServerRecording(read.setup, read.why, read.taken_at_s, segments, read.state)
