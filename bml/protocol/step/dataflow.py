"""The common base of the engines of a step: places in buffers, instructions, and progress."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from bml.protocol.wire.frame import Header


class Buffer(IntEnum):
    """The three buffers of a step, and that of the training state which travels to a joiner (in bytes)."""

    IN = 0
    OUT = 1
    SCRATCH = 2
    STATE = 3


class Place(NamedTuple):
    """A position in a buffer, in elements."""

    buffer: Buffer
    offset: int


class Send(NamedTuple):
    """Send a frame to the next server on its way; its payload is found at `place` (None: it has none)."""

    peer: int
    level: int
    header: Header
    place: Place | None
    priority: int


class Stamp(NamedTuple):
    """The fields that all frames of one try of a step share."""

    epoch: int
    step: int
    signature: int
    itemsize: int


class Reduce(NamedTuple):
    """OUT[start:stop] = sum of the places, added in this order (address order of their servers).

    `into` is where the sum goes instead, if not there.
    """

    start: int
    stop: int
    terms: tuple[Place, ...]
    into: Place | None = None


Instruction = Send | Reduce


class Dataflow:
    """The progress of one try of a step on `server`; subclasses (engines) know its schedule.

    `remaining` elements are not final yet; `finals` are the spans that are, as they became so. Of `expected`
    elements that this server must receive, `handled` have arrived. SCRATCH has `scratch_elements`.
    """

    def __init__(self, server: int, stamp: Stamp, n_elements: int):
        self.server = server
        self.stamp = stamp
        self.n_elements = n_elements
        self.remaining = n_elements
        self.handled = 0
        self.expected = 0
        self.scratch_elements = 0
        self.finals: list[tuple[int, int]] = []

    @property
    def complete(self) -> bool:
        """Every output is final on this server."""
        return self.remaining == 0

    @property
    def progress(self) -> float:
        """Fraction, 0 to 1, of the elements this server must receive that have arrived."""
        return self.handled / self.expected if self.expected else 1.0

    def summand_place(self, header: Header) -> Place | None:
        """Where the payload of an admitted frame belongs, if it need never be there.

        That is, if it is read once, as a term of one sum, without which its sender cannot become complete.
        """
        return None

    def _final(self, start: int, stop: int) -> None:
        """Elements [start, stop) have become final."""
        self.remaining -= stop - start
        self.finals.append((start, stop))
