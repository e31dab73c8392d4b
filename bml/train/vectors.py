"""Makes one contiguous vector of the arrays of a call, and the arrays of a result from a vector."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.bfloat16 import from_float32, is_bfloat16, to_float32

Arrays = npt.ArrayLike | Sequence[Array]
"""The argument of a collective: one array, or a list of arrays of one dtype."""
Ready = Callable[[], object]
"""Returns when the memory that was given to a call holds what is to be contributed."""
Empty = Callable[[int, np.dtype[Any]], Array]
"""Makes an uninitialised one-dimensional array."""

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class Bucket(tuple[Array, ...]):
    """A tuple of arrays of one dtype in one piece of memory; they are reduced together without a copy.

    `Session.bucket` makes it.
    """

    vector: Array
    """All of it, flat: shape (n,), where n is the sum of the sizes."""

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], empty: Callable[[int], Array]) -> Bucket:
        """Arrays of these shapes in memory of `empty`. Raises UsageError without a shape."""
        if not shapes:
            raise UsageError("a bucket needs at least one shape")
        sizes = [prod(shape) for shape in shapes]
        vector = empty(sum(sizes))
        parts = zip(np.split(vector, np.cumsum(sizes)[:-1]), shapes, strict=True)
        bucket = cls(part.reshape(shape) for part, shape in parts)
        bucket.vector = vector
        return bucket


class Described(NamedTuple):
    """A call in words, and the hash that all servers must agree on."""

    text: str
    signature: int


def checked_count(n: Any, name: str) -> int:
    """Return a number of iterations. Raises UsageError if it is not a whole number."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise UsageError(f"{name} must be a whole number, it is {n!r}")
    return max(int(n), 0)


@lru_cache(maxsize=256)
def describe(call: str, dtype: np.dtype[Any], shapes: tuple[tuple[int, ...], ...]) -> Described:
    """Describe a call, without its place in the program: all servers must make it alike."""
    sizes = " ".join(map(str, shapes)) if len(shapes) < 20 else f"{len(shapes)} arrays"
    name = name_of(dtype)
    code = name if is_bfloat16(dtype) else dtype.str
    return Described(f"{call} {name} {sizes}", zlib.crc32(f"{call} {code} {list(shapes)}".encode()))


def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a dtype, for people."""
    return "bfloat16" if is_bfloat16(dtype) else dtype.name


def divide(
    total: Array, n: int, empty: Callable[[tuple[int, ...], npt.DTypeLike], Array], out: Array | None = None
) -> Array:
    """The mean: `total` over `n` samples, in `out`, else in place where it may be written.

    Floating dtypes are kept, float16 is divided in float32; integers give float64.
    """
    if not np.issubdtype(total.dtype, np.inexact):
        return np.true_divide(total, max(n, 1), out=out)
    if out is None:
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

    `widened`: integers narrower than 64 bits as such of 64, so that sums do not wrap round. bool is carried
    as uint8, bfloat16 as float32. The dtype that is returned is the one to which `given_back` leads. Raises
    UsageError for arrays that cannot be reduced together.
    """
    if type(arrays) is np.ndarray:  # most are such, and small steps are short
        dtype = arrays.dtype
        if (dtype is _FLOAT32 or dtype is _FLOAT64) and arrays.ndim == 1 and arrays.flags.c_contiguous:
            return arrays, (arrays.shape,), dtype
    if isinstance(arrays, Bucket):
        vector = _carried(arrays.vector, widened, empty)
        return vector, tuple(part.shape for part in arrays), _result(arrays.vector.dtype, vector)
    if not isinstance(arrays, list | tuple):
        array = np.asarray(arrays)
        check_dtype(array.dtype)
        whole = _carried(array, widened, empty)
        return whole if whole.ndim == 1 else whole.reshape(-1), (array.shape,), _result(array.dtype, whole)
    parts = [np.asarray(array) for array in arrays]
    if not parts:
        raise UsageError("an empty list of arrays cannot be reduced: give at least one array")
    dtype = parts[0].dtype
    if any(part.dtype != dtype for part in parts[1:]):
        dtypes = sorted({part.dtype.str for part in parts})
        raise UsageError(f"arrays of one step must have one dtype, these have {', '.join(dtypes)}")
    check_dtype(dtype)
    vector = empty(sum(part.size for part in parts), _wide(dtype, widened))
    if is_bfloat16(dtype):
        _widen(parts, vector)
    else:
        np.concatenate([part.reshape(-1) for part in parts], out=vector)
    return vector, tuple(part.shape for part in parts), _result(dtype, vector)


def check_not_copied(arrays: Any, flat: Array) -> None:
    """Raise UsageError unless `flat`, which `flatten` made of the arrays, is their own memory.

    What is not there yet cannot be copied.
    """
    own = arrays.vector if isinstance(arrays, Bucket) else arrays
    if not isinstance(own, np.ndarray) or (flat.size and not np.may_share_memory(flat, own)):
        raise UsageError(
            "with ready=… give a bucket of the session or one contiguous array, of a dtype that is reduced "
            "as it is (in a sum no integers narrower than 64 bits, no bfloat16): all else is copied at once"
        )


def given_back(vector: Array, dtype: np.dtype[Any]) -> Array:
    """The result of a step as an array of this dtype, if `vector` only carries it: bool, bfloat16."""
    if dtype.kind == "b":
        return vector.view(np.bool_)
    if is_bfloat16(dtype):
        return from_float32(vector.view(np.float32)).view(dtype)
    return vector


def _result(dtype: np.dtype[Any], vector: Array) -> np.dtype[Any]:
    return vector.dtype if dtype.kind in "iufc" else dtype


def _wide(dtype: np.dtype[Any], widened: bool) -> np.dtype[Any]:
    if dtype.kind in "fc":
        return dtype
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind == "V":
        return _FLOAT32
    if not widened or dtype.itemsize >= 8:
        return dtype
    return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)


def _carried(array: Array, widened: bool, empty: Empty) -> Array:
    """Return the array, contiguous, in the dtype in which it is reduced; copies are made by `empty`."""
    dtype = array.dtype
    wide = _wide(dtype, widened)
    if wide is dtype:
        return np.ascontiguousarray(array)
    if dtype.kind == "b":
        return np.ascontiguousarray(array).view(np.uint8)
    vector = empty(array.size, wide)
    if wide is _FLOAT32:
        _widen([array], vector)
    else:
        vector[...] = array.reshape(-1)
    return vector


def _widen(parts: list[Array], vector: Array) -> None:
    """Write the numbers of arrays of bfloat16 into a float32 vector, one array after the other."""
    at = 0
    for part in parts:
        to_float32(part.reshape(-1).view(np.uint16), vector[at : at + part.size].view(np.float32))
        at += part.size


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise UsageError for a dtype that cannot be reduced."""
    if (dtype.kind not in "biufc" and not is_bfloat16(dtype)) or not dtype.isnative:
        raise UsageError(
            f"dtype {dtype} cannot be reduced: give integers, floats (bfloat16 too), complex numbers or bool "
            "in native byte order"
        )


def unflatten(vector: Array, shapes: tuple[tuple[int, ...], ...], many: bool) -> Any:
    """Return the arrays of these shapes that lie in `vector`, in order; one array unless `many`."""
    if not many:
        return vector.reshape(shapes[0])
    stops = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(vector, stops[:-1]), shapes, strict=True)]


def checked_shape(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as whole numbers. Raises UsageError before any memory is allocated."""
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    except TypeError:
        raise UsageError(f"{shape!r} is not a shape: give a whole number, or a tuple of them") from None
    if any(size < 0 for size in sizes):
        raise UsageError(f"{shape!r} is not a shape: it has a negative size")
    return sizes


def checked_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the dtype. Raises UsageError for one that is not of numbers."""
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"{dtype!r} is not a dtype: {error}") from None
    check_dtype(found)
    return found
