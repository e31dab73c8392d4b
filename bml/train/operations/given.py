"""What one server gives to a collective that moves values: arrays of any dtype, as bytes."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.bfloat16 import is_bfloat16
from bml.train.operations.places import Raw
from bml.train.state import raw
from bml.train.vectors import Bucket, Empty

Shape = tuple[int, ...]


class Given(NamedTuple):
    """Arrays as `parts` of bytes, one after the other; `shapes` and `dtypes` are those of each array."""

    parts: tuple[Raw, ...] = ()
    shapes: tuple[Shape, ...] = ()
    dtypes: tuple[np.dtype[Any], ...] = ()

    @classmethod
    def of(cls, arrays: Any, empty: Empty) -> Given:
        """Those of one array or of a bucket, as it lies if it is contiguous, or of a list, which is copied.

        Raises UsageError for arrays that cannot be moved.
        """
        if isinstance(arrays, Bucket):
            dtypes = (arrays.vector.dtype,) * len(arrays)
            return cls((raw(arrays.vector),), tuple(part.shape for part in arrays), dtypes)
        many = isinstance(arrays, list | tuple)
        found = [np.asarray(array) for array in (arrays if many else [arrays])]
        if not found:
            raise UsageError("an empty list of arrays cannot be sent: give at least one array")
        for array in found:
            _check_movable(array.dtype)
        data = raw(found[0])
        if many:
            data = empty(sum(array.nbytes for array in found), data.dtype).view(np.uint8)
            np.concatenate([raw(array) for array in found], out=data)
        return cls((data,), tuple(array.shape for array in found), tuple(array.dtype for array in found))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each array."""
        return tuple(map(nbytes_of, self.shapes, self.dtypes))

    def check_sum(self) -> int:
        """A check sum of all bytes."""
        found = 0
        for part in self.parts:
            found = zlib.crc32(part.data, found)
        return found


def nbytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    """The bytes of an array of this shape and dtype."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def array_of(data: Raw, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """The array that lies in these bytes. It shares their memory, unless it would not be aligned."""
    array: Array = data.view(dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _check_movable(dtype: np.dtype[Any]) -> None:
    """Raise UsageError for a dtype whose bytes have no meaning on another server, or that has none."""
    if (dtype.kind not in "biufcmMSU" and not is_bfloat16(dtype)) or not dtype.itemsize:
        raise UsageError(
            f"dtype {dtype} cannot be sent: give numbers, bool, times or texts of a fixed length (bytes of "
            "another dtype can be sent as array.view('uint8'))"
        )
