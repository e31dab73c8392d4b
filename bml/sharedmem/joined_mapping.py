"""Segments of several servers, mapped to be read one behind the other: a result that lies in many places."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bml.io.limits import with_room
from bml.io.mapping import reserved
from bml.io.memory import Array, Block
from bml.sharedmem.segment import SegmentAddress, open_to_read


class JoinedMapping:
    """The first `piece_nbytes` of each segment, in order; a multiple of the page size.

    Raises OSError if one of them is gone, NoRoom if this process may map no more.
    """

    def __init__(self, segments: Sequence[SegmentAddress], piece_nbytes: int):
        self.nbytes = len(segments) * piece_nbytes
        with with_room(self.nbytes):
            mapping = reserved(self.nbytes)
        for index, segment in enumerate(segments):
            fd = open_to_read(segment)
            try:
                if os.fstat(fd).st_size < piece_nbytes:
                    raise OSError(f"{segment} is shorter than {piece_nbytes} bytes")
                with with_room(piece_nbytes):
                    mapping.cover(index * piece_nbytes, piece_nbytes, fd)
            finally:
                os.close(fd)
        self._buffer = mapping.view

    def view(self, n_elements: int, dtype: np.dtype[Any]) -> Array:
        """The first elements, to be read while this object is there."""
        return np.frombuffer(self._buffer, dtype, n_elements)

    def array(
        self, n_elements: int, dtype: np.dtype[Any], on_gone: Callable[[], None] | None = None
    ) -> Array:
        """The first elements, read-only. Its memory is there until the last view of it is gone.

        `on_gone()` is called then, in any thread.
        """
        block = Block((n_elements * dtype.itemsize,), np.uint8, self._buffer)
        block.flags.writeable = False
        block.on_gone = partial(_gone, self, on_gone)
        return np.ndarray(n_elements, dtype, block)


def _gone(joined: JoinedMapping, on_gone: Callable[[], None] | None) -> None:
    """Keeps the mapping alive until it is called."""
    if on_gone is not None:
        on_gone()
