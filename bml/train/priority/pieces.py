"""A vector that is reduced in pieces, each of which is a step: what is more urgent overtakes between them.

Behind its elements every piece has a few that are words of the servers to each other, one bit each. They are
reduced with the piece, so they are committed with it, or not at all, and every server reads the same:

    0        a server waits for the training state: all are to come to a boundary with nothing under way
    1 ...    the entry beyond the agreed ones is missing on a server (see Order)

A bit of the result is set if any contributor has set it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from bml.protocol.step.workspace import Array
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.communicator import Committed
from bml.train.priority.order import SLOTS

_BITS = 1 + SLOTS
_NONE: Array = np.empty(0, np.uint8)
_SIGNATURE_STEP = 0x9E3779B1
"""Pieces of one call have signatures this far apart."""
Missing = Callable[[], list[bool]]
"""Which entries beyond the agreed ones are missing here, see Order."""
Prepare = Callable[[View], Array]


class PieceContext(Protocol):
    """What a vector in pieces needs of the collectives of its session."""

    def step(  # noqa: D102
        self, call: tuple[str, int], op: str, prepare: Prepare, shared: bool = False, /
    ) -> Committed: ...

    @property
    def piece_nbytes(self) -> int:
        """About how long a piece is, in bytes."""
        ...

    def piece_memory(self, n_elements: int, dtype: np.dtype[Any], /) -> Array:
        """At least so many elements, with anything in them, that are sent without a copy."""
        ...

    def free_piece(self, memory: Array, /) -> None:
        """The step is committed: the next piece may lie in this memory."""
        ...


class Pieces:
    """The pieces of one call.

    `contribution(view)` is this server's whole vector, of `n_elements` elements of `dtype`, for the members
    of a view. `take(done, start, stop, values)` gets the reduced elements [start, stop) of a committed piece,
    which must be read before it returns.
    """

    def __init__(
        self,
        steps: PieceContext,
        call: tuple[str, int],
        op: str,
        contribution: Prepare,
        take: Callable[[Committed, int, int, Array], None],
        n_elements: int,
        dtype: np.dtype[Any],
    ):
        self._steps = steps
        self._call = call
        self._op = op
        self._contribution = contribution
        self._take = take
        self._dtype = dtype
        self._cuts = cuts(n_elements, dtype.itemsize, steps.piece_nbytes)
        self._n_done = 0
        self.begun_in = 0
        """The iteration of the training function in which the call was made."""
        self.wants_state = False
        """Whether a server waited for the training state when the last piece was brought."""

    @property
    def over(self) -> bool:
        """Whether all pieces are committed."""
        return self._n_done == len(self._cuts) - 1

    def step(self, missing: Missing) -> list[bool]:
        """Synchronise the next piece; returns which entries are missing on any contributor."""
        start, stop = self._cuts[self._n_done : self._n_done + 2]
        size, (text, signature) = stop - start, self._call
        number, n_pieces = self._n_done + 1, len(self._cuts) - 1
        memory: Array | None = None

        def prepare(view: View) -> Array:
            nonlocal memory  # new for every try: frames of the one before may still lie in a queue
            whole, memory = self._contribution(view), self._steps.piece_memory(size + _BITS, self._dtype)
            vector = memory[: size + _BITS]
            vector[:size] = whole[start:stop]
            _write(vector[size:], self._op, [bool(view.learners), *missing()])
            return vector

        call = (
            f"{text}, piece {number} of {n_pieces}",
            (signature + number * _SIGNATURE_STEP) & 0xFFFFFFFF,
        )
        done = self._steps.step(call, self._op, prepare, True)
        if memory is not None:
            self._steps.free_piece(memory)
        bits = _read(done.result[size:], self._op)
        self._take(replace(done, result=_NONE), start, stop, done.result[:size])
        self._n_done = number
        self.wants_state = bits[0]
        return bits[1:]


def checked_priority(priority: int | None, then: object = None) -> int | None:
    """The priority of a step as a whole number. Raises UsageError for other values, and for `then` alone."""
    if priority is None:
        if then is not None:
            raise UsageError("then is for steps with a priority: use the result of wait, or give one")
        return None
    try:
        if isinstance(priority, bool):
            raise TypeError
        return operator.index(priority)
    except TypeError:
        raise UsageError(f"priority is {priority!r}: give a whole number, the lower the sooner") from None


def in_words(priority: int | None) -> str:
    """The priority as a part of the call that servers compare."""
    return "" if priority is None else f" with priority {priority}"


def cuts(n_elements: int, itemsize: int, piece_nbytes: int) -> list[int]:
    """Where a vector is cut into equal pieces, at least one, of about so many bytes: 0, …, n_elements."""
    n_pieces = max(1, round(n_elements * itemsize / piece_nbytes))
    return [number * n_elements // n_pieces for number in range(n_pieces + 1)]


def _write(memory: Array, op: str, bits: Sequence[bool]) -> None:
    """Write bits so that the reduction of all servers' tells, exactly in any dtype, which any has set.

    No sum has 8 bits, in which 256 ones would be 0: integers have 64, and a sum of bool is a maximum.
    """
    if op in ("sum", "max"):
        memory[:] = bits
    else:
        np.logical_not(bits, out=memory, casting="unsafe")


def _read(memory: Array, op: str) -> list[bool]:
    found: list[bool] = (memory != 0 if op in ("sum", "max") else memory == 0).tolist()
    return found
