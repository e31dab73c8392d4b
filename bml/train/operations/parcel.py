"""Shape and dtype of an array as bytes, for servers that get the array and do not know them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bml.topology.errors import UsageError
from bml.train.bfloat16 import BFLOAT16
from bml.train.operations.places import Raw

_BITS = "bits of bfloat16"
"""The name of BFLOAT16, which numpy cannot find by a name."""
PARCEL_NBYTES = 320
"""Enough for a name of 32 bytes and the 64 dimensions that numpy allows, of at most 2**63 elements in all."""


def pack(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Raw:
    """Return shape and dtype as bytes, shape (PARCEL_NBYTES,)."""
    name = _BITS if dtype == BFLOAT16 else dtype.name if dtype.kind == "V" else dtype.str
    text = json.dumps([name, shape]).encode()
    return np.frombuffer(text.ljust(PARCEL_NBYTES), np.uint8)


def unpack(packed: Raw) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype that `pack` was given. Raises UsageError for a dtype unknown here."""
    name, shape = json.loads(packed.tobytes())
    if name == _BITS:
        return tuple(shape), BFLOAT16
    try:
        return tuple(shape), np.dtype(name)
    except TypeError:
        raise UsageError(
            f"the root gives arrays of dtype {name}, which is not known here: import it"
        ) from None
