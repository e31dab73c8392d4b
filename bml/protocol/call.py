"""What a user called in a step, as text on the wire: enough for a learner to take part in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bml.protocol.frame import MAX_TEXT_NBYTES, FrameError

_OPS = ("sum", "min", "max", "prod")


class Call(NamedTuple):
    """`n_elements` of `dtype` (numpy's, as text) reduced with `op`; `text` says it in the user's words."""

    op: str
    dtype: str
    n_elements: int
    text: str

    def encode(self) -> bytes:
        """As it travels: one line for the machine, then the text, as much of it as fits."""
        return f"{self.op} {self.dtype} {self.n_elements}\n{self.text}".encode()[:MAX_TEXT_NBYTES]

    @classmethod
    def decode(cls, received: str) -> Call:
        """Read what `encode` made. Raises FrameError."""
        head, _, text = received.partition("\n")
        try:
            op, dtype, n_elements = head.split(" ")
            call = cls(op, dtype, int(n_elements), text)
            known = op in _OPS and np.dtype(dtype).kind in "iufc" and call.n_elements >= 0
        except (TypeError, ValueError):
            known = False
        if not known:
            raise FrameError(f"{head!r:.80} is no description of a call")
        return call

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize


def neutral(call: Call) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """The contribution, shape (n_elements,), that changes no result."""
    dtype = np.dtype(call.dtype)
    if call.op in ("sum", "prod"):
        return np.full(call.n_elements, 0 if call.op == "sum" else 1, dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.full(call.n_elements, limits.max if call.op == "min" else limits.min, dtype)
    return np.full(call.n_elements, np.inf if call.op == "min" else -np.inf, dtype)
