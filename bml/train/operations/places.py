"""The vector of a collective that moves parts and computes nothing: a place for every part.

The vector is summed as whole numbers. One rank brings a part, the others zeros in its place, so any bits come
through. What one rank brings lies in places that follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Padded, written

Raw = npt.NDArray[np.uint8]
Vector = npt.NDArray[np.generic]
Empty = Callable[[int, npt.DTypeLike], Vector]
"""Makes an uninitialised one-dimensional array that is sent without a copy."""

_WORD = np.dtype(np.uint64)
_BYTE = np.dtype(np.uint8)
_SMALL_NBYTES = 64 << 10
"""Zeros of shorter vectors are written and added sooner than left out."""


class Places:
    """The places of parts of these sizes, in bytes, one after the other without gaps."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = tuple(sizes)
        self._starts = (0, *accumulate(sizes))

    def vector(self, first: int, parts: Sequence[Raw], empty: Empty) -> Vector | Padded:
        """The vector with these bytes from the place `first` on, and zeros in all others.

        It has the same shape (n,) and dtype on every rank: uint64, or uint8 if words of 64 bits do not divide
        it. A part that fills all of it, and is aligned, is not copied. Long zeros are not written.
        """
        nbytes = self._starts[-1]
        word = _BYTE if nbytes % _WORD.itemsize else _WORD
        if len(parts) == 1 and parts[0].size == nbytes:
            found: Vector = parts[0].view(word)
            if found.flags.aligned:
                return found
        made = empty(nbytes // word.itemsize, word)
        data, size = made.view(np.uint8), word.itemsize
        start = stop = self._starts[first]
        for part in parts:
            data[stop : stop + part.size] = part
            stop += part.size
        low, high = start // size, -(-stop // size)
        data[low * size : start] = 0
        data[stop : high * size] = 0
        padded = Padded(made, low, high)
        return written(padded) if nbytes < _SMALL_NBYTES else padded

    def part(self, vector: Vector, place: int) -> Raw:
        """The bytes at a place, as a view of `vector`; they may begin anywhere."""
        return vector.view(np.uint8)[self._starts[place] : self._starts[place + 1]]


def source(rank: int, contributors: Sequence[int]) -> int:
    """The rank whose part counts as that of `rank`: its own, or the lowest contributor's if it is lost."""
    return rank if rank in contributors else min(contributors)
