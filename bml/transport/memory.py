"""The memory that payloads live in: plain, or registered once with every RDMA NIC and handed out in parts.

Arrays of a pool are sent, and received into, without a copy. Transports that need no registration work with
`PlainMemory`, so that who allocates need not know which transport there is.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from ctypes import addressof, c_char
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bml.topology.errors import FabricError, UsageError

Array = npt.NDArray[Any]

POOL_SETTING = "BML_POOL_MIB"
POOL_MAX_SETTING = "BML_POOL_MAX_MIB"

_ALIGN_NBYTES = 256
_PAGE_NBYTES = mmap.PAGESIZE


class Memory(Protocol):
    """Where arrays come from that a transport moves."""

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised, contiguous array."""
        ...


class PlainMemory:
    """Memory for transports that take any."""

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised, contiguous array."""
        return np.empty(shape, dtype)


class Registration(Protocol):
    """A region of memory as one NIC knows it."""

    lkey: int
    rkey: int

    def close(self) -> None:
        """Unregister."""
        ...


Register = Callable[[int, int], Registration]
"""Registers (address, nbytes) with one NIC; raises OSError."""


class Located(NamedTuple):
    """Where a view lies: its address, and its region's registrations, one per NIC in order of `add_nic`."""

    address: int
    registrations: list[Registration]


class Block(np.ndarray[Any, Any]):
    """What an array in memory that is lent has as its base: `on_gone` is called when its last view is gone.

    It must be made from the memory itself: numpy leaves out an array between a view and another array. In any
    thread, as a finalizer is, but made with less: a step that makes one finds little of it in the cache.
    """

    on_gone: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.on_gone is not None:
            self.on_gone()


Map = Callable[[int], mmap.mmap]
"""Makes memory of so many bytes; raises OSError."""


def _shared_map(nbytes: int) -> mmap.mmap:
    # Shared, so that a child that is forked never makes the kernel move a page away from the NIC.
    return mmap.mmap(-1, nbytes)


class _Region:
    """One piece of memory that was registered as a whole, and what of it is free."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self.memory = memory
        self.address = address_of(memoryview(self.memory))
        self.nbytes = nbytes
        self.registrations: list[Registration] = []
        # (start, nbytes) of what is free, in order, never two that touch.
        self.free = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """First fit; returns the offset."""
        for index, (start, size) in enumerate(self.free):
            if size >= nbytes:
                if size == nbytes:
                    del self.free[index]
                else:
                    self.free[index] = (start + nbytes, size - nbytes)
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a part, and join it with its free neighbours."""
        free = self.free
        index = bisect_right(free, (start, 0))
        if index < len(free) and free[index][0] == start + nbytes:
            nbytes += free.pop(index)[1]
        if index and sum(free[index - 1]) == start:
            start, before = free.pop(index - 1)
            nbytes += before
        insort(free, (start, nbytes))


class RegisteredPool:
    """Memory that is registered with every NIC in large regions, each once, and handed out in parts.

    The first region has `nbytes`; when it is full another is made, at least as large, until there are
    `max_nbytes` (None: as much as the machine gives). An array's part is free again when the last view of
    it is gone. `empty` may be called from any thread. `make` makes the memory of a region. Raises
    FabricError that names the setting when there is not enough memory, or not enough of it may be locked.
    """

    def __init__(
        self, nbytes: int = 64 << 20, max_nbytes: int | None = None, make: Map = _shared_map
    ) -> None:
        if nbytes <= 0 or (max_nbytes is not None and max_nbytes < nbytes):
            raise UsageError(
                f"a pool of {nbytes} bytes, at most {max_nbytes}; see {POOL_SETTING} and {POOL_MAX_SETTING}"
            )
        self._first_nbytes = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        self._max_nbytes = max_nbytes
        self._make = make
        self._regions: list[_Region] = []
        self._nics: list[Register] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which may run anywhere, even while this thread holds the lock.
        self._returned: deque[tuple[_Region, int, int]] = deque()

    def add_nic(self, register: Register) -> int:
        """Register all memory, of now and of later, with one more NIC; returns its number."""
        with self._lock:
            for region in self._regions:
                region.registrations.append(_registered(register, region))
            self._nics.append(register)
            return len(self._nics) - 1

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """See `Memory`; an array without elements is no memory of the pool."""
        kind = np.dtype(dtype)
        count = prod(shape) if isinstance(shape, tuple) else shape
        if kind.hasobject or count <= 0:
            return np.empty(shape, kind)
        wanted = count * kind.itemsize
        nbytes = -(-wanted // _ALIGN_NBYTES) * _ALIGN_NBYTES
        with self._lock:
            region, start = self._take(nbytes)
        block = Block((wanted,), np.uint8, region.memory, start)
        block.on_gone = partial(self._returned.append, (region, start, nbytes))
        return np.ndarray(shape, kind, block)

    def find(self, view: memoryview | Array) -> Located | None:
        """Where these bytes lie, or None if they are not the pool's."""
        address = address_of(view)
        for region in self._regions:
            if region.address <= address and address + view.nbytes <= region.address + region.nbytes:
                return Located(address, region.registrations)
        return None

    @property
    def nbytes(self) -> int:
        """How much memory is registered."""
        return sum(region.nbytes for region in self._regions)

    @property
    def free_nbytes(self) -> int:
        """How much of it is free."""
        with self._lock:
            self._collect()
            return sum(size for region in self._regions for _, size in region.free)

    def close(self) -> None:
        """Unregister everything; arrays stay valid as plain memory. Idempotent."""
        with self._lock:
            for region in self._regions:
                while region.registrations:
                    region.registrations.pop().close()
            self._nics.clear()

    def _take(self, nbytes: int) -> tuple[_Region, int]:
        if self._returned:  # what was dropped last is wanted again, as a rule
            last = self._returned.pop()
            if last[2] == nbytes:
                return last[:2]
            last[0].give_back(*last[1:])
        self._collect()
        for region in self._regions:
            start = region.take(nbytes)
            if start is not None:
                return region, start
        region = self._grow(nbytes)
        start = region.take(nbytes)
        assert start is not None
        return region, start

    def _grow(self, nbytes: int) -> _Region:
        size = max(self._first_nbytes, -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES)
        have = self.nbytes
        if self._max_nbytes is not None and have + size > self._max_nbytes:
            size = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
            if have + size > self._max_nbytes:
                raise FabricError(
                    f"the registered pool is full: {have >> 20} MiB are in use or in pieces too small, "
                    f"{nbytes} bytes more are wanted and {POOL_MAX_SETTING} allows "
                    f"{self._max_nbytes >> 20} MiB; raise it"
                )
        try:
            region = _Region(self._make(size), size)
        except (OSError, MemoryError) as error:
            raise FabricError(
                f"no memory for {size >> 20} MiB more of the registered pool ({error}); "
                f"lower {POOL_SETTING}, or limit the pool by {POOL_MAX_SETTING}"
            ) from error
        for register in self._nics:
            region.registrations.append(_registered(register, region))
        self._regions.append(region)
        return region

    def _collect(self) -> None:
        while self._returned:
            region, start, nbytes = self._returned.popleft()
            region.give_back(start, nbytes)


def address_of(view: memoryview | Array) -> int:
    """The address of a contiguous view's first byte."""
    try:
        # It is asked for every frame, and numpy takes longer.
        return addressof(c_char.from_buffer(view))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # it is read-only, or empty
        pass
    array = view if isinstance(view, np.ndarray) else np.frombuffer(view, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


def _registered(register: Register, region: _Region) -> Registration:
    try:
        return register(region.address, region.nbytes)
    except OSError as error:
        raise FabricError(
            f"an RDMA NIC does not take {region.nbytes >> 20} MiB of memory: {error}; allow this process to "
            f"lock more (ulimit -l, LimitMEMLOCK= of its service), or lower {POOL_SETTING}"
        ) from error
