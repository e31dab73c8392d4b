"""The arrays of a call as one contiguous vector, and a vector as the arrays of a result."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bml.protocol.reuse import StepMemory
from bml.protocol.workspace import Array
from topology.errors import UsageError


class Bucket(tuple[Array, ...]):
    """Arrays of one dtype that lie one after the other in `vector`: reduced together without being copied."""

    vector: Array


@lru_cache(maxsize=256)
def describe(call: str, dtype: np.dtype[Any], shapes: tuple[tuple[int, ...], ...]) -> tuple[str, int]:
    """A call in words, and the hash that all servers must agree on."""
    sizes = " ".join(map(str, shapes)) if len(shapes) < 20 else f"{len(shapes)} arrays"
    return f"{call} {dtype.name} {sizes}", zlib.crc32(f"{call} {dtype.str} {list(shapes)}".encode())


def divide(total: Array, n: int, empty: Callable[[tuple[int, ...], npt.DTypeLike], Array]) -> Array:
    """The mean: `total` over `n` samples, in place where it may be written, floating dtypes kept."""
    if np.issubdtype(total.dtype, np.inexact):
        out = total if total.flags.writeable else empty(total.shape, total.dtype)
        return np.divide(total, total.dtype.type(max(n, 1)), out=out)
    return np.true_divide(total, max(n, 1))


def flatten(arrays: Any, memory: StepMemory) -> tuple[Array, tuple[tuple[int, ...], ...], np.dtype[Any]]:
    """One contiguous vector, without a copy where there is one already, and the shapes in it.

    Raises UsageError for arrays that cannot be reduced together.
    """
    if not isinstance(arrays, list | tuple):
        array = np.asarray(arrays)
        _check_dtype(array.dtype)
        whole = np.ascontiguousarray(array)
        return whole if whole.ndim == 1 else whole.reshape(-1), (array.shape,), array.dtype
    parts = [np.asarray(array) for array in arrays]
    if not parts:
        raise UsageError("an empty list of arrays cannot be reduced: give at least one array")
    dtype = parts[0].dtype
    if any(part.dtype != dtype for part in parts[1:]):
        dtypes = sorted({part.dtype.str for part in parts})
        raise UsageError(f"arrays of one step must have one dtype, these have {', '.join(dtypes)}")
    _check_dtype(dtype)
    shapes = tuple(part.shape for part in parts)
    if isinstance(arrays, Bucket):
        return arrays.vector, shapes, dtype
    flats = [np.ascontiguousarray(part).reshape(-1) for part in parts]
    if len(flats) == 1:
        return flats[0], shapes, dtype
    vector = memory.empty(sum(flat.size for flat in flats), dtype)
    return np.concatenate(flats, out=vector), shapes, dtype


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "iufc" or not dtype.isnative:
        raise UsageError(f"dtype {dtype} cannot be reduced: give integers or floats in native byte order")


def unflatten(vector: Array, shapes: tuple[tuple[int, ...], ...], many: bool) -> Any:
    """The arrays of these shapes that lie in `vector`, one after the other; one array unless `many`."""
    if not many:
        return vector.reshape(shapes[0])
    stops = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(vector, stops[:-1]), shapes, strict=True)]
