"""How the training state reaches a joiner: every neighbour sends a part of it, over all NICs at once.

The state is a string of bytes, the same on every donor, as it stands at a step boundary. It is cut into
pieces; piece i goes over link i mod `parts`, where the joiner's links to donors are counted in order of
(server, level). A view change ends a transfer: its donors' state is of the past, so the next view
starts another. Every part carries a hash, checked when all pieces are there, and a check sum of the donor's
whole state: pieces of states that differ would make one that no server ever had.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from bml.errors import StateMismatch
from bml.protocol.wire.frame import FrameError, Header
from bml.protocol.wire.messages import View
from bml.topology import Fabric
from bml.topology.errors import FabricError

MAX_PIECES = 1 << 20
"""Most pieces into which a state may be cut."""

_MOST_SUMMED = 16 << 20
"""Bytes of a state, in windows all over it, that are compared: to read all of a large one would show."""
_WINDOW = 1 << 12


class SegmentedBytes(Protocol):
    """Bytes that may lie in several pieces of memory; a memoryview is the simplest."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> bytes | memoryview: ...


class Part(NamedTuple):
    """Part number `number` of `parts` of a state that is cut into pieces of `piece_nbytes`."""

    number: int
    parts: int
    piece_nbytes: int

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """The (start, stop) of every piece of this part of a state of `nbytes`, in order."""
        for start in range(self.number * self.piece_nbytes, nbytes, self.parts * self.piece_nbytes):
            yield start, min(start + self.piece_nbytes, nbytes)

    def digest(self, state: SegmentedBytes) -> str:
        """The hash of this part of the whole state."""
        total = hashlib.blake2b(digest_size=16)
        for start, stop in self.pieces(len(state)):
            total.update(state[start:stop])
        return total.hexdigest()


class OutgoingPart(NamedTuple):
    """The part of the state that a donor sends to `peer` over its NIC of `level`."""

    peer: int
    level: int
    part: Part


class OutgoingState(NamedTuple):
    """The parts that a donor sends in the view `epoch`, of the state at a boundary after step `commit`."""

    epoch: int
    commit: int
    parts: tuple[OutgoingPart, ...]


def outgoing_state(view: View, fabric: Fabric, server: int, piece_nbytes: int) -> OutgoingState | None:
    """The parts that `server` has to send in this view on this (damaged) fabric; None: nothing."""
    if server not in view.contributors:
        return None
    parts: list[OutgoingPart] = []
    for learner in view.learners:
        links = sorted(
            (donor, level)
            for level in range(fabric.levels)
            for donor in fabric.neighbours(learner, level)
            if donor in view.contributors
        )
        parts += [
            OutgoingPart(learner, level, Part(number, len(links), piece_nbytes))
            for number, (donor, level) in enumerate(links)
            if donor == server
        ]
    return OutgoingState(view.epoch, view.commit, tuple(parts)) if parts else None


class Head(NamedTuple):
    """Announces a part: the state's length in bytes, the part, its hash, a check sum of the `whole`."""

    nbytes: int
    part: Part
    digest: str
    whole: str

    def encode(self) -> bytes:
        """The text that is sent."""
        return " ".join(map(str, (self.nbytes, *self.part, self.digest, self.whole))).encode()

    @classmethod
    def decode(cls, text: str) -> Head:
        """Read a text of `encode`. Raises FrameError."""
        try:
            *numbers, digest, whole = text.split(" ")
            nbytes, number, parts, piece_nbytes = map(int, numbers)
        except ValueError:
            raise FrameError(f"{text!r:.80} announces no part of a state") from None
        if not 0 <= number < parts or piece_nbytes < 1 or not 0 <= nbytes <= MAX_PIECES * piece_nbytes:
            raise FrameError(f"there is no part {number} of {parts} of {nbytes} bytes in {piece_nbytes}")
        return cls(nbytes, Part(number, parts, piece_nbytes), digest, whole)


class IncomingState:
    """The state that comes to a learner, and the pieces that are still missing."""

    def __init__(self) -> None:
        self.step = -1
        self.nbytes = 0
        self._whole = ""
        self._digests: dict[int, str] = {}
        self._parts = 0
        self._piece_nbytes = 0
        self._missing: set[int] = set()  # starts of pieces

    @property
    def complete(self) -> bool:
        """Every part was announced, and every piece of it is there."""
        return self._parts > 0 and len(self._digests) == self._parts and not self._missing

    @property
    def digests(self) -> dict[Part, str]:
        """Part -> its hash."""
        return {
            Part(number, self._parts, self._piece_nbytes): digest for number, digest in self._digests.items()
        }

    def head(self, header: Header, head: Head) -> bool:
        """A part is announced; returns whether it is the first one.

        Raises FrameError if it does not fit, StateMismatch if it is of another state than those before.
        """
        number, parts, piece_nbytes = head.part
        first = not self._parts
        if first:
            self.step, self.nbytes, self._whole = header.step, head.nbytes, head.whole
            self._parts, self._piece_nbytes = parts, piece_nbytes
        if (header.step, parts, piece_nbytes) != (self.step, self._parts, self._piece_nbytes):
            raise FrameError(
                f"server {header.origin} sends its state of step {header.step} in {parts} parts of "
                f"{piece_nbytes} bytes, others theirs of step {self.step} in {self._parts} of "
                f"{self._piece_nbytes}"
            )
        if (head.nbytes, head.whole) != (self.nbytes, self._whole):
            raise StateMismatch(
                f"server {header.origin} has another training state after step {self.step} than others "
                f"({head.nbytes} bytes, {head.whole}; {self.nbytes} bytes, {self._whole}), so none can be "
                "sent to a server that joins: what session.state and session.state_fn name must be changed "
                "alike on all servers; name nothing of which each server has its own"
            )
        if number in self._digests:
            raise FrameError(f"server {header.origin} sends part {number} of the state again")
        self._digests[number] = head.digest
        self._missing.update(start for start, _ in head.part.pieces(head.nbytes))
        return first

    def check(self, header: Header) -> None:
        """Raise FrameError unless this piece is expected."""
        stop = min(header.start + self._piece_nbytes, self.nbytes)
        if header.step != self.step or header.start not in self._missing or header.stop != stop:
            raise FrameError(f"no state {header.start}:{header.stop} at step {header.step} is missing")

    def arrived(self, header: Header) -> None:
        """A piece is in its place."""
        self._missing.discard(header.start)


def cut(state: SegmentedBytes, parts: Iterable[OutgoingPart]) -> tuple[tuple[Head, ...], bytearray]:
    """Return the heads of these parts of the whole state, and a copy of all their pieces in a row."""
    kept = bytearray()
    heads = []
    whole = f"{check_sum(state):08x}"
    for each in parts:
        heads.append(Head(len(state), each.part, each.part.digest(state), whole))
        for start, stop in each.part.pieces(len(state)):
            kept += state[start:stop]
    return tuple(heads), kept


def check_sum(state: SegmentedBytes, most: int = _MOST_SUMMED) -> int:
    """Return a sum of at most so many bytes of the state, in windows that are spread evenly."""
    nbytes, window = len(state), _WINDOW
    stride = nbytes // (most // window)
    if nbytes <= most:
        stride = window = max(nbytes, 1)
    total = 0
    for start in range(0, nbytes, stride):
        total = zlib.crc32(state[start : start + window], total)
    return total


def verify(state: memoryview, digests: Mapping[Part, str]) -> None:
    """Raise FabricError unless every part has its donor's hash."""
    for part, expected in digests.items():
        if part.digest(state) != expected:
            raise FabricError(f"part {part.number} of {part.parts} of the training state arrived damaged")
