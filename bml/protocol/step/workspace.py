"""The memory of one step on one server, and the only two things done to it: view and reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bml.protocol.step.dataflow import Buffer, Place, Reduce
from bml.protocol.step.spans import Spans, size

Array = NDArray[np.generic]

#: Operation -> the ufunc that combines two partial results.
OPS: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}

_BLOCK_NBYTES = 64 << 10


class Padded(NamedTuple):
    """A contribution to a sum that is zero outside of elements [start, stop).

    There `vector` may hold anything. Whoever needs the zeros writes them; see `written`.
    """

    vector: Array
    start: int
    stop: int


def vector_of(contribution: Array | Padded) -> Array:
    """The vector of a contribution, whatever it holds where it is zero."""
    return contribution.vector if isinstance(contribution, Padded) else contribution


def written(contribution: Array | Padded) -> Array:
    """The vector of a contribution, with its zeros written into it."""
    if not isinstance(contribution, Padded):
        return contribution
    vector, start, stop = contribution
    vector[:start] = 0
    vector[stop:] = 0
    return vector


class Workspace:
    """IN, OUT and SCRATCH of a step.

    `contribution` is a contiguous one-dimensional array; it is only read, so that a failed step can
    be tried again with it. OUT is new for every try. `empty(shape, dtype)` makes OUT and SCRATCH.
    """

    def __init__(
        self,
        contribution: Array,
        scratch_elements: int,
        op: str,
        empty: Callable[[int, np.dtype[Any]], Array] = np.empty,
    ):
        self._op, self._op_name = OPS[op], op
        self._empty = empty
        self._whole: tuple[Array, Array, Spans] | None = (
            None  # contribution, result, what of it this is about
        )
        self._arrays: tuple[Array, ...] = (
            contribution,
            empty(contribution.size, contribution.dtype),
            empty(scratch_elements, contribution.dtype),
        )
        self._elsewhere: dict[Place, Array] = {}
        self.itemsize = contribution.itemsize
        self._bytes = tuple(_raw(array) for array in self._arrays)

    @property
    def result(self) -> Array:
        """OUT; final where the engine says so."""
        out = self._arrays[Buffer.OUT]
        if self._whole is None:
            return out
        _, result, left = self._whole
        base = 0
        for start, stop in left:
            result[start:stop] = out[base : base + stop - start]
            base += stop - start
        return result

    def resume(self, left: Spans, scratch_elements: int) -> Workspace:
        """The workspace of another try that is only about these elements of OUT; the others are kept.

        This one is of no use any more: its memory serves the other.
        """
        result = self.result
        contribution = self._whole[0] if self._whole else self._arrays[Buffer.IN]
        self._arrays, self._bytes, self._whole = (), (), None
        part = self._empty(size(left), contribution.dtype)
        np.concatenate([contribution[start:stop] for start, stop in left], out=part)
        again = Workspace(part, scratch_elements, self._op_name, self._empty)
        again._whole = (contribution, result, left)
        return again

    def view(self, place: Place, n_elements: int) -> memoryview:
        """Bytes of `n_elements` elements at `place`."""
        start = place.offset * self.itemsize
        return self._bytes[place.buffer][start : start + n_elements * self.itemsize]

    def refer(self, place: Place, payload: memoryview) -> None:
        """The next sum with a term that begins at `place` finds it in `payload`, which is read then."""
        self._elsewhere[place] = np.frombuffer(payload, self._arrays[Buffer.IN].dtype)

    def reduce(self, instruction: Reduce) -> None:
        """Add the terms, in their order, into OUT[start:stop], or where `into` says."""
        start, stop, terms, into = instruction
        size = stop - start
        buffer, offset = into or (Buffer.OUT, start)
        out = self._arrays[buffer][offset : offset + size]
        if self._elsewhere:
            parts = [self._term(place, size) for place in terms]
        else:
            parts = [self._arrays[buffer][offset : offset + size] for buffer, offset in terms]
        if len(parts) == 1:
            out[...] = parts[0]
        elif len(parts) == 2:
            self._op(parts[0], parts[1], out=out)
        else:
            # Block by block, so that the sum so far is still in the cache when the next term is added. It is
            # kept apart to the last: one of the terms may lie where the result goes.
            block = max(1, _BLOCK_NBYTES // self.itemsize)
            sums = np.empty(min(block, size), out.dtype)
            for low in range(0, size, block):
                self._add([part[low : low + block] for part in parts], out[low : low + block], sums)

    def _term(self, place: Place, size: int) -> Array:
        found = self._elsewhere.pop(place, None)
        return found if found is not None else self._arrays[place.buffer][place.offset : place.offset + size]

    def _add(self, parts: list[Array], out: Array, sums: Array) -> None:
        sums = sums[: out.size]
        self._op(parts[0], parts[1], out=sums)
        for part in parts[2:-1]:
            self._op(sums, part, out=sums)
        self._op(sums, parts[-1], out=out)


def _raw(array: Array) -> memoryview:
    """The bytes of a contiguous array; memoryview refuses to cast an empty one."""
    return memoryview(array.data).cast("B") if array.size else memoryview(b"")
