"""bfloat16, the upper half of a float32, in arrays of its bits: numpy itself does not have it.

Numbers are widened to float32, reduced there, and rounded once at the end, whatever the number of servers is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""The dtype of bfloat16 numbers for programs without ml_dtypes: `bits.view(BFLOAT16)`."""

_BLOCK = 1 << 15
"""So many elements at a time stay in the cache between the passes over them."""
_QUIET_NAN = np.uint16(0x0040)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is `BFLOAT16`, or the bfloat16 of ml_dtypes."""
    return dtype.kind == "V" and (dtype == BFLOAT16 or dtype.name == "bfloat16")


def to_float32(bits: Bits, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """Return the numbers whose bits these are, shape and all: every bfloat16 is a float32.

    `out`, if given, is a contiguous float32 array of the same size, and takes the numbers.
    """
    wide = np.empty(bits.shape, np.float32) if out is None else out
    raw = wide.reshape(-1).view(np.uint32)
    np.left_shift(bits.reshape(-1), np.uint32(16), out=raw, dtype=np.uint32)
    return wide


def from_float32(numbers: npt.NDArray[np.float32], out: Bits | None = None) -> Bits:
    """Return the bits of the nearest bfloat16 of each number, shape and all; of two, the even one.

    Numbers of which the nearest would be 2**128 are infinite. NaN stays NaN, with its sign and the upper part
    of its payload, and is quiet. `out`, if given, is a contiguous uint16 array of the same size, and takes
    the bits.
    """
    rounded = np.empty(numbers.shape, np.uint16) if out is None else out
    to, raw = rounded.reshape(-1), np.ascontiguousarray(numbers).reshape(-1).view(np.uint32)
    for at in range(0, raw.size, _BLOCK):
        _round(raw[at : at + _BLOCK], to[at : at + _BLOCK])
    return rounded


def _round(raw: npt.NDArray[np.uint32], to: Bits) -> None:
    half = raw >> np.uint32(16)
    half &= np.uint32(1)
    half += np.uint32(0x7FFF)  # a half, or a bit less if the number below is the even one
    half += raw
    half >>= np.uint32(16)
    to[...] = half
    is_nan = (raw & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        to[is_nan] = (raw[is_nan] >> np.uint32(16)).astype(np.uint16) | _QUIET_NAN
