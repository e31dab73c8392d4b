"""Segments of several servers, mapped to be read one behind the other: a result that lies in many places."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bml.transport.memory import Array, Block
from bml.transport.shm.segment import SegmentAddress, open_to_read

_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Joined:
    """The first `piece_nbytes` of each segment, in order; a multiple of the page size. Raises OSError."""

    def __init__(self, segments: Sequence[SegmentAddress], piece_nbytes: int):
        self.nbytes = len(segments) * piece_nbytes
        nowhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _map(None, self.nbytes, 0, nowhere, -1)
        weakref.finalize(self, _libc.munmap, start, self.nbytes).atexit = False
        for index, segment in enumerate(segments):
            fd = open_to_read(segment)
            try:
                if os.fstat(fd).st_size < piece_nbytes:
                    raise OSError(f"{segment} is shorter than {piece_nbytes} bytes")
                flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
                _map(start + index * piece_nbytes, piece_nbytes, mmap.PROT_READ, flags, fd)
            finally:
                os.close(fd)
        self._buffer = memoryview((ctypes.c_char * self.nbytes).from_address(start)).cast("B")

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


def _gone(joined: Joined, on_gone: Callable[[], None] | None) -> None:
    """Keeps the mapping alive until it is called."""
    if on_gone is not None:
        on_gone()


def _map(start: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    address = _libc.mmap(start, nbytes, protection, flags, fd, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)
