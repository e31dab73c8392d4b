"""Values of any dtype as whole numbers, so that a sum with zeros gives every bit of them back.

A collective that moves values is a sum of vectors of words. Every server that brings values has a place of
its own in that vector, and zeros in the places of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.bfloat16 import is_bfloat16
from bml.train.vectors import Bucket, Empty

Shape = tuple[int, ...]
_WORD = np.dtype(np.uint64)
_BYTE = np.dtype(np.uint8)


class Raw(NamedTuple):
    """Arrays as bytes, shape (n,), one array after the other; `dtypes` has the dtype of each."""

    data: npt.NDArray[np.uint8]
    shapes: tuple[Shape, ...]
    dtypes: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, arrays: Any, empty: Empty) -> Raw:
        """Those of one array or of a bucket, as it lies if it is contiguous, or of a list, which is copied.

        Raises UsageError for arrays that cannot be moved.
        """
        if isinstance(arrays, Bucket):
            dtypes = (arrays.vector.dtype,) * len(arrays)
            return cls(_bytes(arrays.vector), tuple(part.shape for part in arrays), dtypes)
        if not isinstance(arrays, list | tuple):
            array = np.asarray(arrays)
            check_movable(array.dtype)
            return cls(_bytes(array), (array.shape,), (array.dtype,))
        parts = [np.asarray(array) for array in arrays]
        if not parts:
            raise UsageError("an empty list of arrays cannot be sent: give at least one array")
        for part in parts:
            check_movable(part.dtype)
        data = empty(sum(part.nbytes for part in parts), _BYTE).view(np.uint8)
        np.concatenate([_bytes(part) for part in parts], out=data)
        return cls(data, tuple(part.shape for part in parts), tuple(part.dtype for part in parts))


def check_movable(dtype: np.dtype[Any]) -> None:
    """Raise UsageError for a dtype whose bytes have no meaning on another server, or that has none."""
    if (dtype.kind not in "biufcmMSU" and not is_bfloat16(dtype)) or not dtype.itemsize:
        raise UsageError(
            f"dtype {dtype} cannot be sent: give numbers, bool, times or texts of a fixed length (bytes of "
            "another dtype can be sent as array.view('uint8'))"
        )


def word_of(nbytes: int) -> np.dtype[Any]:
    """The dtype of the words of a vector of so many bytes; it is the same on every server."""
    return _BYTE if nbytes % _WORD.itemsize else _WORD


def words(data: npt.NDArray[np.uint8], empty: Empty) -> Array:
    """Bytes as a vector of words, without a copy if they are aligned."""
    word = word_of(data.size)
    vector: Array = data.view(word)
    if vector.flags.aligned:
        return vector
    aligned = empty(vector.size, word)
    aligned.view(np.uint8)[...] = data
    return aligned


def zeros(nbytes: int, empty: Empty) -> Array:
    """A vector of words that changes no sum, of so many bytes."""
    word = word_of(nbytes)
    vector = empty(nbytes // word.itemsize, word)
    vector.fill(0)
    return vector


def in_place(data: npt.NDArray[np.uint8], place: int, n_places: int, empty: Empty) -> Array:
    """A vector of words with these bytes in one of `n_places` places, and zeros in the others."""
    vector = zeros(n_places * data.size, empty)
    vector.view(np.uint8)[place * data.size : (place + 1) * data.size] = data
    return vector


def from_words(vector: Array, shapes: tuple[Shape, ...], dtypes: tuple[np.dtype[Any], ...]) -> list[Array]:
    """The arrays of these shapes and dtypes that lie one after the other in a vector of words.

    They share its memory, unless they would not be aligned.
    """
    data, at, found = vector.view(np.uint8), 0, []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        part = data[at : at + nbytes].view(dtype).reshape(shape)
        found.append(part if part.flags.aligned else part.copy())
        at += nbytes
    return found


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
