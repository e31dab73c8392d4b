"""The arrays of the user that take the result of a collective (`out=`).

They are checked when the collective is called, and written when its step is committed: until then one of them
may be the contribution itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.bfloat16 import is_bfloat16


class Outputs:
    """`given` is an array, or a list of arrays, for results of these shapes and dtypes.

    Raises UsageError for arrays that cannot take them.
    """

    def __init__(
        self, given: Any, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], many: bool
    ):
        if isinstance(given, list | tuple) is not many:
            raise UsageError(f"out must be {'a list of arrays' if many else 'one array'}, as the result is")
        self._given = given
        self._arrays: list[Array] = list(given) if many else [given]
        if len(self._arrays) != len(shapes):
            raise UsageError(f"out has {len(self._arrays)} arrays, the result {len(shapes)}")
        for array, shape, dtype in zip(self._arrays, shapes, dtypes, strict=True):
            _check(array, shape, dtype)

    def take(self, result: Sequence[Array | None]) -> Any:
        """Write a result into them; returns what was given, with None for an array of which there is none."""
        for array, part in zip(self._arrays, result, strict=True):
            if part is not None:
                _write(array, part)
        if not isinstance(self._given, list | tuple):
            return self._given
        return [each if part is not None else None for each, part in zip(self._arrays, result, strict=True)]


def _check(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        what = "an array that cannot be written" if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(f"out is {what}: give a numpy array that can be written")
    if array.shape != shape:
        raise UsageError(f"out has shape {array.shape}, the result {shape}")
    if not _fits(dtype, array.dtype):
        raise UsageError(f"out has dtype {array.dtype}, which cannot take a result of dtype {dtype}")


def _fits(dtype: np.dtype[Any], into: np.dtype[Any]) -> bool:
    if is_bfloat16(dtype) or is_bfloat16(into):
        return is_bfloat16(dtype) and is_bfloat16(into)
    return np.can_cast(dtype, into, "same_kind")


def _write(array: Array, part: Array) -> None:
    if is_bfloat16(array.dtype):
        array, part = array.view(np.uint16), part.view(np.uint16)
    with np.errstate(all="ignore"):  # a number may be infinite in a narrower dtype, also if numpy is to raise
        np.copyto(array, part, casting="same_kind")
