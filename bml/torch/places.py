"""Moves bytes by a sum: a vector has a place for every part, and a rank brings zeros where it has no part.

Sums of 64-bit integers are exact, so any bits come through. A place begins at a multiple of eight bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Raw = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Empty = Callable[[int, npt.DTypeLike], npt.NDArray[np.generic]]
"""Makes an uninitialised one-dimensional array that is sent without a copy."""

_WORD = 8


class Places:
    """The places of parts of these sizes, in bytes, one after the other."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = tuple(sizes)
        self._starts = (0, *accumulate(_in_words(size) for size in sizes))

    @property
    def n_words(self) -> int:
        """The length of the vector, in words of 64 bits."""
        return self._starts[-1]

    def vector(self, parts: Mapping[int, Raw], empty: Empty) -> Words:
        """The vector with these parts (bytes by place) in it, uint64, shape (n_words,); else zeros.

        A single part that fills the vector is not copied.
        """
        if len(parts) == 1 and len(self.sizes) == 1:
            (only,) = parts.values()
            if only.size % _WORD == 0 and only.ctypes.data % _WORD == 0:
                return only.view(np.uint64)
        made = empty(self.n_words, np.uint64).view(np.uint64)
        made[:] = 0
        whole = made.view(np.uint8)
        for place, part in parts.items():
            start = self._starts[place] * _WORD
            whole[start : start + part.size] = part
        return made

    def part(self, vector: Words, place: int) -> Raw:
        """The bytes at a place, as a view of `vector`."""
        start = self._starts[place] * _WORD
        return vector.view(np.uint8)[start : start + self.sizes[place]]


def source(rank: int, contributors: Sequence[int]) -> int:
    """The rank whose part counts as that of `rank`: its own, or the lowest contributor's if it is lost."""
    return rank if rank in contributors else min(contributors)


def _in_words(nbytes: int) -> int:
    return -(-nbytes // _WORD)
