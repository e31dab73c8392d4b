"""The header in front of every payload on the data plane: fixed size, big-endian, checked field by field.

Pure: bytes in, `Header` out, or `FrameError`. A frame is one header of `HEADER_NBYTES` bytes and then
`nbytes` of payload; the payload is opaque here. Relays pass frames on unchanged, so a header names the
two servers of its tree edge (`origin`, `dest`) and not the two ends of the connection it travels on.

Between servers that share a host the payload of a slice may stay where it is (a zero-copy send). A reference
frame is the header, with a magic number of its own, and the `REFERENCE_NBYTES` bytes of a `Reference`, which
says where to read the payload.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from bml.topology.errors import FabricError, InvariantError

MAGIC = b"BML\xf1"
REFERENCE_MAGIC = b"BML\xf2"
"""Of a frame whose payload is not behind it."""
REFERENCE_AT = 3
REFERENCE_BYTE = REFERENCE_MAGIC[REFERENCE_AT]
"""The byte that tells such a frame from others."""
VERSION = 1
MAX_TEXT_NBYTES = 4096
"""Longest payload of a DESCRIBE frame."""
MAX_NBYTES = 64 << 20
"""Longest payload of any frame unless the receiver sets its own limit."""

# magic, version, kind, origin, dest, two reserved bytes, epoch, signature, step, start, stop, nbytes
_LAYOUT = struct.Struct(">4sBBHHHIIQQQI")
HEADER_NBYTES = _LAYOUT.size
# segment, fences, offset
_REFERENCE = struct.Struct(">IIQ")
REFERENCE_NBYTES = _REFERENCE.size
REFERENCE_FRAME_NBYTES = HEADER_NBYTES + REFERENCE_NBYTES
"""All of a reference frame."""


class FrameError(FabricError):
    """These bytes are no frame: damaged, of another version, or longer than allowed."""


class Kind(enum.IntEnum):
    """The kinds of frames, by their payload."""

    REDUCE = 0
    """A slice of a partial sum on its way to the root."""
    BROADCAST = 1
    """A slice of the result on its way to the leaves."""
    TOKEN = 2
    """A token of the commit barrier; `start` is the phase, no payload."""
    DESCRIBE = 3
    """The call of the sender's training function: at most 4 KiB (bml.protocol.wire.call)."""
    HEAD = 4
    """The announcement of the sender's part of the training state: at most 4 KiB."""
    STATE = 5
    """Bytes of the training state for a joiner; `step` is the last that is in it."""


# Faster than calling Kind for every frame.
_KINDS = tuple(Kind)


class Header(NamedTuple):
    """One frame's header.

    `origin` and `dest` are the servers at the two ends of the tree edge; `signature` is a hash of what
    the user's call looks like; `start` and `stop` are a range of elements (TOKEN: the barrier phase and
    0; STATE: of bytes; DESCRIBE, HEAD: 0 and the length); `nbytes` is the length of the payload.
    """

    kind: Kind
    epoch: int
    step: int
    origin: int
    dest: int
    signature: int
    start: int
    stop: int
    nbytes: int


class Reference(NamedTuple):
    """Where the payload of a reference frame lies in the memory of the server that sent it (not of `origin`).

    `segment` is the number of a piece of its memory and `offset` bytes into it; it is good for as long
    as its owner has fenced `fences` times (modulo 2**32), see bml.sharedmem.zero_copy.
    """

    segment: int
    fences: int
    offset: int


def pack(header: Header) -> bytes:
    """Return the `HEADER_NBYTES` bytes of a header; raises InvariantError if a field does not fit."""
    kind, epoch, step, origin, dest, signature, start, stop, nbytes = header
    try:
        return _LAYOUT.pack(
            MAGIC, VERSION, kind, origin, dest, 0, epoch, signature, step, start, stop, nbytes
        )
    except struct.error as error:
        raise InvariantError(f"header does not fit the wire format: {header} ({error})") from error


def unpack(buffer: bytes | bytearray | memoryview, offset: int = 0, max_nbytes: int = MAX_NBYTES) -> Header:
    """Read the header at `offset`; raises FrameError on anything that `pack` of a sane header cannot make.

    `max_nbytes` is the longest payload that the receiver is ready for, in bytes.
    """
    try:
        fields = _LAYOUT.unpack_from(buffer, offset)
    except struct.error as error:
        raise FrameError(f"header cut short: {error}") from error
    magic, version, kind, origin, dest, reserved, epoch, signature, step, start, stop, nbytes = fields
    if magic != MAGIC:
        raise FrameError(f"no frame starts here: magic {magic!r}")
    if version != VERSION or reserved:
        raise FrameError(f"frame of version {version}.{reserved}, this side speaks {VERSION}.0")
    if nbytes > max_nbytes:
        raise FrameError(f"payload of {nbytes} bytes, at most {max_nbytes} are allowed")
    if kind <= Kind.BROADCAST:
        span = stop - start
        if span < 0 or (nbytes % span if span else nbytes):
            raise FrameError(f"elements [{start}, {stop}) do not fit {nbytes} bytes")
    else:
        _check_small(kind, start, stop, nbytes)
    return Header(_KINDS[kind], epoch, step, origin, dest, signature, start, stop, nbytes)


def _check_small(kind: int, start: int, stop: int, nbytes: int) -> None:
    if kind == Kind.TOKEN:
        if stop or nbytes:
            raise FrameError(f"token with stop {stop} and {nbytes} bytes of payload, both must be 0")
    elif kind in (Kind.DESCRIBE, Kind.HEAD):
        if stop - start != nbytes or nbytes > MAX_TEXT_NBYTES:
            raise FrameError(
                f"text of {nbytes} bytes for [{start}, {stop}), at most {MAX_TEXT_NBYTES} are allowed"
            )
    elif kind == Kind.STATE:
        if stop - start != nbytes or not nbytes:
            raise FrameError(f"{nbytes} bytes of state for [{start}, {stop})")
    else:
        raise FrameError(f"unknown kind {kind}")


def pack_reference(head: bytes, reference: Reference) -> bytes:
    """Return a reference frame, of `REFERENCE_FRAME_NBYTES`: a packed header and where its payload lies."""
    return REFERENCE_MAGIC + head[len(MAGIC) :] + _REFERENCE.pack(*reference)


def unpack_reference(
    buffer: bytes | bytearray | memoryview, offset: int = 0, max_nbytes: int = MAX_NBYTES
) -> tuple[Header, Reference]:
    """Read the reference frame at `offset`; raises FrameError as `unpack` does."""
    referenced = bytes(buffer[offset : offset + REFERENCE_FRAME_NBYTES])
    if len(referenced) < REFERENCE_FRAME_NBYTES or not referenced.startswith(REFERENCE_MAGIC):
        raise FrameError(f"no reference frame: {referenced!r}")
    header = unpack(MAGIC + referenced[len(MAGIC) :], 0, max_nbytes)
    if header.kind > Kind.BROADCAST or not header.nbytes:
        raise FrameError(f"only slices are sent by reference, not {header}")
    return header, Reference(*_REFERENCE.unpack_from(referenced, HEADER_NBYTES))
