"""Memory of steps that is used again: what a new step needs, an older one has had mapped and warm already.

Asking the kernel for a result and scratch memory in every step costs a third of a large step's processor
time, as it clears every page of them. So arrays come in leases: when the last view of one is gone (the
user's of a result, the transport's of what it sends or receives), its memory serves a later step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LEAST_NBYTES = 64 << 10
"""Smaller arrays come from the allocator's own free lists: reuse has nothing to gain."""
_MOST_IDLE = 64
"""Memory that so many arrays in a row had no use for is given up."""


class _Lease:
    """What all views of an array that was handed out have as their base: when the last is gone, so is this.

    No array itself, for numpy leaves out arrays between a view and the memory.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: Array, n_elements: int, dtype: np.dtype[Any]):
        self.__array_interface__ = {
            "version": 3,
            "shape": (n_elements,),
            "typestr": dtype.str,
            "data": (memory.__array_interface__["data"][0], False),
        }


class StepMemory:
    """Arrays for steps, in memory made by `empty(shape, dtype)` and used again when all views of it are gone.

    `empty` belongs to one thread; views may be dropped in any. At most as much lies idle as the last
    `_MOST_IDLE` arrays together needed at one time.
    """

    def __init__(self, empty: Callable[[int, np.dtype[Any]], Array] = np.empty):
        self._empty = empty
        # (memory, number of the request that had it last), smallest first.
        self._idle: list[tuple[Array, int]] = []
        # Filled by finalizers, which may run in any thread.
        self._returned: deque[tuple[Array, int]] = deque()
        self._requests = 0

    def empty(self, n_elements: int, dtype: np.dtype[Any]) -> Array:
        """An uninitialised one-dimensional array."""
        nbytes = n_elements * dtype.itemsize
        if nbytes < _LEAST_NBYTES:
            return self._empty(n_elements, dtype)
        self._requests += 1
        memory = self._take(nbytes)
        lease = _Lease(memory, n_elements, dtype)
        # It also keeps the memory alive, for as long as there is a view of it.
        weakref.finalize(lease, self._returned.append, (memory, self._requests)).atexit = False
        return np.asarray(lease)

    @property
    def idle_nbytes(self) -> int:
        """How much memory waits to be used again."""
        self._collect()
        return sum(memory.nbytes for memory, _ in self._idle)

    def _take(self, nbytes: int) -> Array:
        self._collect()
        for index, (memory, _) in enumerate(self._idle):
            if nbytes <= memory.nbytes <= 2 * nbytes:
                return self._idle.pop(index)[0]
        return self._empty(nbytes, np.dtype(np.uint8))

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        oldest = self._requests - _MOST_IDLE
        self._idle = [each for each in self._idle if each[1] > oldest]
        self._idle.sort(key=lambda each: each[0].nbytes)
