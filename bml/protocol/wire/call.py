"""The call of a training function in a step, as text on the wire: enough for a learner to take part in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bml.protocol.wire.frame import MAX_TEXT_NBYTES, FrameError
from bml.topology.errors import FabricError

MAX_CALL_NBYTES = 1 << 37
"""Longest vector of one call that a learner follows."""

_OPS = ("sum", "min", "max", "prod")
#: The dtypes that can be reduced, each as numpy writes it; other spellings that numpy accepts are refused.
_ITEMSIZES = {np.dtype(code).str: np.dtype(code).itemsize for code in "bBhHiIlLqQefdgFDG"}


class Call(NamedTuple):
    """Reduce `n_elements` of `dtype` (numpy's, as text) with `op`; `text` is the call in the user's words."""

    op: str
    dtype: str
    n_elements: int
    text: str

    def encode(self) -> bytes:
        """The bytes that are sent: one line to parse, then the text, cut to MAX_TEXT_NBYTES in all."""
        return f"{self.op} {self.dtype} {self.n_elements}\n{self.text}".encode()[:MAX_TEXT_NBYTES]

    @classmethod
    def decode(cls, received: str) -> Call:
        """Read the text of `encode`. Raises FrameError."""
        head, _, text = received.partition("\n")
        try:
            op, dtype, number = head.split(" ")
            n_elements = int(number)
            known = op in _OPS and 0 <= n_elements * _ITEMSIZES[dtype] <= MAX_CALL_NBYTES
        except (KeyError, ValueError):
            known = False
        if not known:
            raise FrameError(f"{head!r:.80} is no description of a call")
        return cls(op, dtype, n_elements, text)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZES[self.dtype]


def neutral(call: Call) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """The contribution, shape (n_elements,), that changes no result.

    Raises FabricError if there is not enough memory.
    """
    dtype = np.dtype(call.dtype)
    try:
        if call.op == "sum":
            return np.zeros(call.n_elements, dtype)
        if call.op == "prod":
            return np.ones(call.n_elements, dtype)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return np.full(call.n_elements, limits.max if call.op == "min" else limits.min, dtype)
        return np.full(call.n_elements, np.inf if call.op == "min" else -np.inf, dtype)
    except MemoryError as error:
        raise FabricError(f"no memory to follow {call.text}: {error}") from None
