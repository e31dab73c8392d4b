"""The files of checkpoints: a checkpoint is the snapshot of a boundary, cut into equal parts, one file each.

    000000000201-bml-5b0c1e-0002-of-0009.bmlpart      steps, job, part, how many parts

    8 bytes     magic
    4 bytes     length of the header, little endian
    header      msgpack of Header
    32 bytes    blake2b of all before it
    payload     bytes [start, stop) of the snapshot (bml.train.snapshot)

A part has this name only when it is whole on the disk; some stores show it before. A checkpoint is whole if
all of its parts are there, are undamaged and belong together. So no file must be written last, and no server
waits for another one.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

_MAGIC = b"bmlpart1"
_NAME = re.compile(r"(\d{12,})-(.+)-(\d{4,})-of-(\d{4,})\.bmlpart")
_DIGEST_NBYTES = 32
_LENGTH_NBYTES = 4
UNFINISHED = ".unfinished"
"""The end of the name of a part that is being written."""


class Damaged(Exception):
    """A file that is not a whole part of a checkpoint; the text says why."""


class Key(NamedTuple):
    """A checkpoint: made after so many committed steps, by this job, in so many parts."""

    steps: int
    job: str
    n_parts: int

    def file(self, part: int) -> str:
        """The name of the file of a part."""
        return f"{self.steps:012d}-{self.job}-{part:04d}-of-{self.n_parts:04d}.bmlpart"

    def __str__(self) -> str:
        return f"the checkpoint after step {self.steps} of the job {self.job}"


decode_key = msgspec.msgpack.Decoder(Key).decode
"""Decode a checkpoint. Raises msgspec.MsgspecError for other bytes."""


class Header(msgspec.Struct, frozen=True):
    """What a part says of itself: `nbytes` is the length of the whole snapshot, `state` a digest of its
    manifest and of samples of its arrays, which is equal in all parts, `payload` that of this part's bytes.
    """

    steps: int
    job: str
    n_parts: int
    part: int
    nbytes: int
    state: bytes
    payload: bytes

    @property
    def key(self) -> Key:
        """The checkpoint of the part."""
        return Key(self.steps, self.job, self.n_parts)

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the snapshot that the part has."""
        return span(self.nbytes, self.part, self.n_parts)


_decode = msgspec.msgpack.Decoder(Header).decode


def digest(*pieces: bytes | memoryview) -> bytes:
    """The blake2b of bytes."""
    found = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for piece in pieces:
        found.update(piece)
    return found.digest()


def span(nbytes: int, part: int, n_parts: int) -> tuple[int, int]:
    """The first byte of a part of a snapshot, and the first behind it."""
    return nbytes * part // n_parts, nbytes * (part + 1) // n_parts


def head_of(header: Header) -> bytes:
    """The bytes of the file of a part before its payload."""
    packed = msgspec.msgpack.encode(header)
    head = _MAGIC + len(packed).to_bytes(_LENGTH_NBYTES, "little") + packed
    return head + digest(head)


def read_part(
    pieces: Iterable[bytes], key: Key, part: int, take: Callable[[Header, int, memoryview], None]
) -> Header:
    """Read the file of a part, given in pieces; the first must have all of the header.

    `take` is called with the header, a place in the snapshot and the bytes there, before their digest is
    known to be right. Raises Damaged unless the file is the whole part of this checkpoint.
    """
    rest = iter(pieces)
    first = memoryview(next(rest, b""))
    header, at = _header(first)
    if (header.key, header.part) != (key, part):
        raise Damaged("it is another part")
    start, stop = header.span
    found = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    place = start
    for piece in chain((first[at:],), map(memoryview, rest)):
        if place + len(piece) > stop:
            raise Damaged("it is too long")
        found.update(piece)
        take(header, place, piece)
        place += len(piece)
    if place < stop:
        raise Damaged("it is cut off")
    if found.digest() != header.payload:
        raise Damaged("its bytes were changed")
    return header


def _header(data: memoryview) -> tuple[Header, int]:
    """The header, and where the payload begins."""
    begin = len(_MAGIC) + _LENGTH_NBYTES
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise Damaged("it does not begin as a part does")
    end = begin + int.from_bytes(data[len(_MAGIC) : begin], "little")
    if digest(data[:end]) != bytes(data[end : end + _DIGEST_NBYTES]):
        raise Damaged("its header was changed")
    try:
        return _decode(data[begin:end]), end + _DIGEST_NBYTES
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"its header is of another version: {error}") from None


def by_key(names: Iterable[str]) -> dict[Key, set[int]]:
    """The checkpoints of which there are files, and which parts of each; other files are left out."""
    found: defaultdict[Key, set[int]] = defaultdict(set)
    for name in names:
        if match := _NAME.fullmatch(name):
            steps, job, part, n_parts = match.groups()
            if int(part) < int(n_parts):
                found[Key(int(steps), job, int(n_parts))].add(int(part))
    return dict(found)


def superseded(
    names: Sequence[str],
    job: str,
    base: int,
    known: Iterable[Key],
    dropped: Collection[Key],
    keep: int,
    torn: Collection[Key] = (),
) -> list[str]:
    """The files that are no longer needed, when the newest `keep` whole checkpoints stay.

    `job` is the job that writes now. It went on from step `base` of another one, so checkpoints of other jobs
    with more steps were not whole, and are not needed once this job has a whole one. `known` are whole as the
    servers have agreed, also if not all of their parts are in this folder; those `dropped` never will be.
    `torn` have all of their parts by name, and are not whole.
    """
    there, agreed = by_key(names), set(known)
    ours = {key for key in there if key.job == job}
    line = ours | {key for key in there if key.steps <= base}
    # Of this job's, one that has all parts may still be dropped, if it was not written by one server alone.
    whole = sorted(
        key
        for key in line
        if key in agreed
        or (len(there[key]) == key.n_parts and key not in torn and (key not in ours or key.n_parts == 1))
    )
    gone = ours.intersection(dropped)
    floor = 0
    if len(whole) >= keep:
        floor = whole[-keep].steps
        gone |= {key for key in line if key.steps < floor}
        if ours.intersection(whole):
            gone |= set(there) - line
    files = {key.file(part) for key in gone for part in there[key]}
    return [name for name in names if name in files or (floor and _is_left_behind(name, job, floor))]


def _is_left_behind(name: str, job: str, floor: int) -> bool:
    """Whether it is an unfinished part of a job that is over, or of a server that died long ago."""
    stem, dot, _ = name.partition(".bmlpart.")
    match = _NAME.fullmatch(f"{stem}.bmlpart") if dot and name.endswith(UNFINISHED) else None
    return match is not None and (match[2] != job or int(match[1]) < floor)
