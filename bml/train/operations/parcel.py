"""Shape and dtype of an array as whole numbers, for servers that get the array and do not know them."""

from __future__ import annotations

from typing import Any

import numpy as np

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.train.bfloat16 import BFLOAT16

_NAME_NBYTES = 32
_MOST_DIMENSIONS = 64
"""numpy has no arrays of more."""
_BITS = "bits of bfloat16"
"""The name of BFLOAT16, which numpy cannot find by a name."""
PARCEL_WORDS = _NAME_NBYTES // 8 + 1 + _MOST_DIMENSIONS


def pack(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return shape and dtype as `PARCEL_WORDS` words: uint64, shape (PARCEL_WORDS,)."""
    name = _BITS if dtype == BFLOAT16 else dtype.name if dtype.kind == "V" else dtype.str
    found = np.zeros(PARCEL_WORDS, np.uint64)
    found[: _NAME_NBYTES // 8].view(np.uint8)[: len(name)] = np.frombuffer(name.encode(), np.uint8)
    numbers = found[_NAME_NBYTES // 8 :]
    numbers[0] = len(shape)
    numbers[1 : 1 + len(shape)] = shape
    return found


def unpack(packed: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype that `pack` was given. Raises UsageError for a dtype unknown here."""
    name = packed[: _NAME_NBYTES // 8].tobytes().rstrip(b"\0").decode()
    numbers = [int(each) for each in packed[_NAME_NBYTES // 8 :]]
    shape = tuple(numbers[1 : 1 + numbers[0]])
    if name == _BITS:
        return shape, BFLOAT16
    try:
        return shape, np.dtype(name)
    except TypeError:
        raise UsageError(
            f"the root gives arrays of dtype {name}, which is not known here: import it"
        ) from None
