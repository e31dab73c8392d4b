"""Segments of several servers, mapped one behind the other: a result whose shares lie in many places."""

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
    """A read-only mapping of the first `share_nbytes` of each segment, in order.

    `share_nbytes` is a multiple of the page size. Raises OSError if a segment is gone, NoRoom if this process
    may map no more.
    """

    def __init__(self, segments: Sequence[SegmentAddress], share_nbytes: int):
        self.nbytes = len(segments) * share_nbytes
        with with_room(self.nbytes):
            mapping = reserved(self.nbytes)
        for index, segment in enumerate(segments):
            fd = open_to_read(segment)
            try:
                if os.fstat(fd).st_size < share_nbytes:
                    raise OSError(f"{segment} is shorter than {share_nbytes} bytes")
                with with_room(share_nbytes):
                    mapping.cover(index * share_nbytes, share_nbytes, fd)
            finally:
                os.close(fd)
        self._buffer = mapping.view

    def view(self, n_elements: int, dtype: np.dtype[Any]) -> Array:
        """The first elements; the view is valid while this object exists."""
        return np.frombuffer(self._buffer, dtype, n_elements)

    def array(
        self, n_elements: int, dtype: np.dtype[Any], on_gone: Callable[[], None] | None = None
    ) -> Array:
        """The first elements, read-only. The mapping exists until the last view of the array is gone.

        Then `on_gone()` is called, in any thread.
        """
        block = Block((n_elements * dtype.itemsize,), np.uint8, self._buffer)
        block.flags.writeable = False
        block.on_gone = partial(_gone, self, on_gone)
        return np.ndarray(n_elements, dtype, block)


def _gone(joined: JoinedMapping, on_gone: Callable[[], None] | None) -> None:
    """Called when the array is gone; its argument keeps the mapping alive until then."""
    if on_gone is not None:
        on_gone()
