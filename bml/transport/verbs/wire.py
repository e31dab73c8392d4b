"""The messages of a verbs connection as bytes: set-up messages, messages in slots, immediate values. Pure.

To set up a queue pair, each side sends two short messages on the authenticated stream:

    HELLO   generation, queue pair, the ring that the peer may write to, how many of its messages were handled
    READY   generation; sent when the queue pair can receive, so that nothing is written before

Everything else is RDMA WRITE WITH IMMEDIATE. The immediate value says what was written:

    RING     a message was written to the next slot of the ring   + how many messages the writer has handled
    CREDIT   nothing was written                                  + the same
    DONE     the payloads of granted offers are complete          + the last one's number, how many before it

A message in a slot is FRAME (a header and its whole payload), OFFERS (headers of payloads that wait),
GRANTS (where they may be written; no key: not wanted) or CANCELS (granted, but they will not come).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from bml.protocol.wire.frame import HEADER_NBYTES, FrameError
from bml.transport.verbs.rdma import Address

VERSION = 2
COUNT_MASK = 0xFF_FFFF

OFFER_MASK = 0xFFFF
"""The part of an offer's number that fits into an immediate value."""

_KIND_SHIFT = 30
_OFFER_BITS = 16


class Imm(IntEnum):
    """The kinds of immediate values."""

    RING = 1
    CREDIT = 2
    DONE = 3


class Slot(IntEnum):
    """The kinds of messages in slots."""

    FRAME = 1
    OFFERS = 2
    GRANTS = 3
    CANCELS = 4


class PairHello(NamedTuple):
    """HELLO; `handled` is the number of the peer's messages that were handled in all generations."""

    generation: int
    address: Address
    ring_address: int
    ring_rkey: int
    slots: int
    slot_nbytes: int
    handled: int


class Grant(NamedTuple):
    """The place where the payload of an offer may be written; rkey and address are 0 if it is not wanted."""

    offer: int
    rkey: int
    address: int


# version, mtu, queue pair, psn, generation, ring rkey, slots, slot_nbytes, ring address, handled, gid
_HELLO = struct.Struct(">BBIIIIIIQQ40s")
_READY = struct.Struct(">BI")
HEAD = struct.Struct(">HH")
"""Kind and number of items, at the beginning of every message."""
FRAME_OVERHEAD_NBYTES = HEAD.size + HEADER_NBYTES
_OFFER = struct.Struct(f">I{HEADER_NBYTES}s")
_GRANT = struct.Struct(">IIQ")
_CANCEL = struct.Struct(">I")
_GENERATION = struct.Struct(">I")


def pack_imm(kind: Imm, value: int) -> int:
    """The immediate value of this kind and the low 24 bits of `value`."""
    return kind << _KIND_SHIFT | value & COUNT_MASK


def unpack_imm(imm: int) -> tuple[int, int]:
    """(kind, low 24 bits)."""
    return imm >> _KIND_SHIFT, imm & COUNT_MASK


def pack_done(last: int, before: int) -> int:
    """The immediate value DONE for the offer `last` and the `before` offers in front of it."""
    return pack_imm(Imm.DONE, before << _OFFER_BITS | last & OFFER_MASK)


def unpack_done(value: int) -> range:
    """The offers, by the low bits of their numbers, that this value of DONE names."""
    last, before = value & OFFER_MASK, value >> _OFFER_BITS
    return range(last - before, last + 1)


def after(offer: int) -> int:
    """The number of the next offer, modulo 2^32."""
    return offer + 1 & 0xFFFF_FFFF


def advance(count: int, low: int) -> int:
    """The smallest number that is not below `count` and whose low 24 bits are `low`."""
    return count + (low - count & COUNT_MASK)


def pack_hello(hello: PairHello) -> bytes:
    """The bytes of a HELLO."""
    number, psn, gid, mtu = hello.address
    return b"H" + _HELLO.pack(
        VERSION,
        mtu,
        number,
        psn,
        hello.generation,
        hello.ring_rkey,
        hello.slots,
        hello.slot_nbytes,
        hello.ring_address,
        hello.handled,
        gid.encode(),
    )


def pack_ready(generation: int) -> bytes:
    """The bytes of a READY."""
    return b"R" + _READY.pack(VERSION, generation)


def unpack_setup(message: bytes) -> PairHello | int:
    """A HELLO, or the generation of a READY; raises FrameError on anything else."""
    kind, body = message[:1], message[1:]
    if kind == b"R" and len(body) == _READY.size:
        version, generation = _READY.unpack(body)
        hello = None
    elif kind == b"H" and len(body) == _HELLO.size:
        version, mtu, number, psn, generation, rkey, slots, slot_nbytes, ring, handled, gid = _HELLO.unpack(
            body
        )
        address = Address(number, psn, gid.rstrip(b"\0").decode("ascii", "replace"), mtu)
        hello = PairHello(generation, address, ring, rkey, slots, slot_nbytes, handled)
    else:
        raise FrameError(
            f"no set-up message of the verbs transport: {message[:16]!r}; does the peer use verbs too?"
        )
    if version != VERSION:
        raise FrameError(f"the peer's verbs transport has version {version}, this server's has {VERSION}")
    return generation if hello is None else hello


def pack_offers(offers: list[tuple[int, bytes]]) -> bytes:
    """A message of offers: (number, packed header)."""
    return HEAD.pack(Slot.OFFERS, len(offers)) + b"".join(_OFFER.pack(*offer) for offer in offers)


def pack_grants(generation: int, grants: list[Grant]) -> bytes:
    """A message of grants that hold in this generation of the queue pair only."""
    head = HEAD.pack(Slot.GRANTS, len(grants)) + _GENERATION.pack(generation)
    return head + b"".join(_GRANT.pack(*grant) for grant in grants)


def pack_cancels(offers: list[int]) -> bytes:
    """A message of the numbers of offers whose payloads will not come."""
    return HEAD.pack(Slot.CANCELS, len(offers)) + b"".join(_CANCEL.pack(offer) for offer in offers)


def most_offers(slot_nbytes: int) -> int:
    """The number of offers that fit into one message."""
    return (slot_nbytes - HEAD.size) // _OFFER.size


def most_grants(slot_nbytes: int) -> int:
    """The number of grants that fit into one message."""
    return (slot_nbytes - HEAD.size - _GENERATION.size) // _GRANT.size


def most_cancels(slot_nbytes: int) -> int:
    """The number of cancels that fit into one message."""
    return (slot_nbytes - HEAD.size) // _CANCEL.size


def read_offer(slot: memoryview, index: int) -> tuple[int, bytes]:
    """(number, packed header) of one offer of a message."""
    number, head = _unpack(_OFFER, slot, HEAD.size + index * _OFFER.size)
    return number, head


def read_grants(slot: memoryview, count: int) -> tuple[int, Iterator[Grant]]:
    """(generation, grants) of a message."""
    (generation,) = _unpack(_GENERATION, slot, HEAD.size)
    start = HEAD.size + _GENERATION.size
    items = slot[start : start + count * _GRANT.size]
    if len(items) < count * _GRANT.size:
        raise FrameError(f"message in a slot cut short: {count} grants do not fit")
    return generation, map(Grant._make, _GRANT.iter_unpack(items))


def read_cancels(slot: memoryview, count: int) -> Iterator[int]:
    """The numbers of a message of cancels."""
    return (_unpack(_CANCEL, slot, HEAD.size + i * _CANCEL.size)[0] for i in range(count))


def _unpack(layout: struct.Struct, slot: memoryview, offset: int) -> tuple[Any, ...]:
    try:
        return layout.unpack_from(slot, offset)
    except struct.error as error:
        raise FrameError(f"message in a slot cut short: {error}") from error
