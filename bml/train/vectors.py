"""Makes one contiguous vector of the arrays of a call, and the arrays of a result from a vector."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError

Arrays = npt.ArrayLike | Sequence[Array]
"""The argument of a collective: one array, or a list of arrays of one dtype."""
Empty = Callable[[int, np.dtype[Any]], Array]
"""Makes an uninitialised one-dimensional array."""

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class Bucket(tuple[Array, ...]):
    """A tuple of arrays of one dtype in one piece of memory; they are reduced together without a copy.

    `Session.bucket` makes it.
    """

    vector: Array
    """All of it, flat: shape (n,), where n is the sum of the sizes."""


class Described(NamedTuple):
    """A call in words, and the hash that all servers must agree on."""

    text: str
    signature: int


@lru_cache(maxsize=256)
def describe(call: str, dtype: np.dtype[Any], shapes: tuple[tuple[int, ...], ...]) -> Described:
    """Describe a call, without its place in the program: all servers must make it alike."""
    sizes = " ".join(map(str, shapes)) if len(shapes) < 20 else f"{len(shapes)} arrays"
    return Described(
        f"{call} {dtype.name} {sizes}", zlib.crc32(f"{call} {dtype.str} {list(shapes)}".encode())
    )


def divide(total: Array, n: int, empty: Callable[[tuple[int, ...], npt.DTypeLike], Array]) -> Array:
    """The mean: `total` over `n` samples, in place where it may be written.

    Floating dtypes are kept, float16 is divided in float32; integers give float64.
    """
    if not np.issubdtype(total.dtype, np.inexact):
        return np.true_divide(total, max(n, 1))
    out = total if total.flags.writeable else empty(total.shape, total.dtype)
    with np.errstate(all="ignore"):  # a sum may be infinite, also if the user has numpy raise
        if total.dtype == np.float16:
            out[...] = total.astype(np.float32) / np.float32(max(n, 1))
            return out
        return np.divide(total, total.dtype.type(max(n, 1)), out=out)


def flatten(
    arrays: Any, empty: Empty, widened: bool = False
) -> tuple[Array, tuple[tuple[int, ...], ...], np.dtype[Any]]:
    """One contiguous vector and the shapes in it: a copy of a list, one array or a bucket as it lies.

    `widened`: integers narrower than 64 bits as such of 64, so that sums do not wrap round. Raises UsageError
    for arrays that cannot be reduced together.
    """
    if type(arrays) is np.ndarray:  # most are such, and small steps are short
        dtype = arrays.dtype
        if (dtype is _FLOAT32 or dtype is _FLOAT64) and arrays.ndim == 1 and arrays.flags.c_contiguous:
            return arrays, (arrays.shape,), dtype
    if isinstance(arrays, Bucket):
        vector = _in_64_bits(arrays.vector, empty) if widened else arrays.vector
        return vector, tuple(part.shape for part in arrays), vector.dtype
    if not isinstance(arrays, list | tuple):
        array = np.asarray(arrays)
        check_dtype(array.dtype)
        whole = _in_64_bits(array, empty) if widened else np.ascontiguousarray(array)
        return whole if whole.ndim == 1 else whole.reshape(-1), (array.shape,), whole.dtype
    parts = [np.asarray(array) for array in arrays]
    if not parts:
        raise UsageError("an empty list of arrays cannot be reduced: give at least one array")
    dtype = parts[0].dtype
    if any(part.dtype != dtype for part in parts[1:]):
        dtypes = sorted({part.dtype.str for part in parts})
        raise UsageError(f"arrays of one step must have one dtype, these have {', '.join(dtypes)}")
    check_dtype(dtype)
    dtype = _wide(dtype, widened)
    vector = empty(sum(part.size for part in parts), dtype)
    np.concatenate([part.reshape(-1) for part in parts], out=vector)
    return vector, tuple(part.shape for part in parts), dtype


def _wide(dtype: np.dtype[Any], widened: bool) -> np.dtype[Any]:
    if dtype.kind not in "iu" or not widened or dtype.itemsize >= 8:
        return dtype
    return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)


def _in_64_bits(array: Array, empty: Empty) -> Array:
    """Return the array, contiguous, with integers of 64 bits, in memory that is sent without another copy."""
    dtype = array.dtype
    wide = _wide(dtype, True)
    if wide is dtype:
        return np.ascontiguousarray(array)
    vector = empty(array.size, wide)
    vector[...] = array.reshape(-1)
    return vector


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise UsageError for a dtype that cannot be reduced."""
    if dtype.kind not in "iufc" or not dtype.isnative:
        raise UsageError(
            f"dtype {dtype} cannot be reduced: give integers, floats or complex numbers in native byte order"
        )


def unflatten(vector: Array, shapes: tuple[tuple[int, ...], ...], many: bool) -> Any:
    """Return the arrays of these shapes that lie in `vector`, in order; one array unless `many`."""
    if not many:
        return vector.reshape(shapes[0])
    stops = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(vector, stops[:-1]), shapes, strict=True)]
