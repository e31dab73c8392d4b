"""A pool allocator for payloads: memory is registered once with every RDMA NIC, and reused between steps.

If the kernel were asked for results and scratch memory in every step, it would clear every page of them,
which takes a third of a large step's processor time. Arrays of a pool are sent, and received into, without a
copy.
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

from bml.io import forks
from bml.io.mapping import OwnMemory, PrivateMemory, SharedMemory
from bml.topology.errors import FabricError, UsageError

Array = npt.NDArray[Any]

POOL_SETTING = "BML_POOL_MIB"
POOL_MAX_SETTING = "BML_POOL_MAX_MIB"

_ALIGN_NBYTES = 256
_PAGE_NBYTES = mmap.PAGESIZE
_HUGE_NBYTES = 2 << 20
_FIRST_NBYTES = 8 << 20
_LEAST_NBYTES = 64 << 10
_LEAST_REVIEWED_NBYTES = 64 << 20
_IDLE_FACTOR = 16


class Memory(Protocol):
    """An allocator of arrays that a transport moves."""

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised, contiguous array of this shape and dtype."""
        ...


class Registration(Protocol):
    """A region of memory that is registered with one RDMA NIC: its local and its remote key."""

    lkey: int
    rkey: int

    def close(self) -> None:
        """Unregister the region."""
        ...


Register = Callable[[int, int], Registration]
"""A function that registers (address, nbytes) with one NIC; it raises OSError."""


class Located(NamedTuple):
    """The address of a view, and the registrations of its region: one per NIC, in the order of `add_nic`."""

    address: int
    registrations: list[Registration]


class Block(np.ndarray[Any, Any]):
    """The base of an array in pool memory: `on_gone` is called when its last view is gone.

    It must be made from the memory itself, as numpy skips an array between a view and another array.
    `on_gone` is called in any thread, as a finalizer is. A Block is cheaper to make than a finalizer: a step
    that makes one finds little of the finalizer's code in the cache.
    """

    on_gone: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.on_gone is not None:
            self.on_gone()


class _Region:
    """A piece of memory that was registered as a whole, and a list of its free parts."""

    def __init__(self, memory: OwnMemory, nbytes: int) -> None:
        self.memory = memory
        self.start = memory.start
        self.nbytes = nbytes
        self.registrations: list[Registration] = []
        # (start, nbytes) of the free parts, in order; adjacent parts are always joined.
        self.free = [(0, nbytes)]
        self.used_nbytes = 0
        self.touched_nbytes = 0
        """The largest offset that was ever handed out: the kernel has given pages up to it."""
        self.needed_at = 0
        """When a quarter of the touched bytes was last in use, by the clock `RegisteredPool._volume`."""

    def has(self, address: int, nbytes: int) -> bool:
        """Whether all these bytes lie in the region."""
        return self.start <= address and address + nbytes <= self.start + self.nbytes

    def take(self, nbytes: int) -> int | None:
        """Take the first free part that is large enough; returns its offset, None if there is none."""
        for index, (start, size) in enumerate(self.free):
            if size >= nbytes:
                if size == nbytes:
                    del self.free[index]
                else:
                    self.free[index] = (start + nbytes, size - nbytes)
                self.used_nbytes += nbytes
                self.touched_nbytes = max(self.touched_nbytes, start + nbytes)
                return start
        return None

    def needed(self, at: int) -> None:
        """Note that a part of the region is handed out now."""
        if 4 * self.used_nbytes >= self.touched_nbytes:
            self.needed_at = at

    def close(self) -> None:
        """Unregister the region, and share it no more; views of it stay valid."""
        while self.registrations:
            self.registrations.pop().close()
        self.memory.close()

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a part, and join it with its free neighbours."""
        self.used_nbytes -= nbytes
        free = self.free
        index = bisect_right(free, (start, 0))
        if index < len(free) and free[index][0] == start + nbytes:
            nbytes += free.pop(index)[1]
        if index and sum(free[index - 1]) == start:
            start, before = free.pop(index - 1)
            nbytes += before
        insort(free, (start, nbytes))


class RegisteredPool:
    """Memory in large regions, each registered once with every NIC, that is handed out in parts.

    The first region has `nbytes`, later ones are larger. When an array fits into no region, regions without
    arrays are dropped and a new one is made, up to `max_nbytes` in all (None: no limit of the pool's own). A
    region without arrays is also dropped when 16 times its bytes were handed out since it was last needed. So
    the idle memory is never more than was needed at one time lately, and little work is done to make a region
    again.

    An array's part is free again when the last view of it is gone. `empty` may be called from any thread.
    `make` makes the memory of a region. Arrays of less than `least_nbytes` come from the heap, which is in
    the cache and quicker. Raises FabricError, which names the setting, when there is not enough memory, or
    when the process may not lock enough of it; UsageError for sizes that contradict each other.
    """

    def __init__(
        self,
        nbytes: int = 64 << 20,
        max_nbytes: int | None = None,
        make: Callable[[int], OwnMemory] = SharedMemory,
        least_nbytes: int = 0,
    ) -> None:
        if nbytes <= 0 or (max_nbytes is not None and max_nbytes < nbytes):
            raise UsageError(
                f"a pool of {nbytes} bytes, at most {max_nbytes}; see {POOL_SETTING} and {POOL_MAX_SETTING}"
            )
        self._first_nbytes = _in_pages(nbytes)
        self._max_nbytes = max_nbytes
        self._make = make
        self._least_nbytes = max(least_nbytes, 1)
        # Smallest first, so that small arrays do not keep a large region in use. Never changed in place.
        self._regions: list[_Region] = []
        self._nics: list[Register] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which may run anywhere, even while this thread holds the lock.
        self._returned: deque[tuple[_Region, int, int]] = deque()
        # Bytes that were ever handed out: the pool's clock.
        self._volume = 0
        self._review_at = 0
        self.changes = 0
        """The number of changes: regions made or dropped. Others compare it with what they have mapped."""
        forks.on_fork(self)

    def add_nic(self, register: Register) -> int:
        """Register all present and future memory with one more NIC; returns the NIC's number."""
        with self._lock:
            for region in self._regions:
                region.registrations.append(_registered(register, region))
            self._nics.append(register)
            return len(self._nics) - 1

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """See `Memory`. An array that is empty, or smaller than `least_nbytes`, comes from the heap.

        Raises FabricError as the class says.
        """
        kind = np.dtype(dtype)
        count = prod(shape) if isinstance(shape, tuple) else shape
        wanted = count * kind.itemsize
        if kind.hasobject or wanted < self._least_nbytes:
            return np.empty(shape, kind)
        nbytes = -(-wanted // _ALIGN_NBYTES) * _ALIGN_NBYTES
        with self._lock:
            region, start = self._take(nbytes)
        block = Block((wanted,), np.uint8, region.memory.memory, start)
        block.on_gone = partial(self._returned.append, (region, start, nbytes))
        return np.ndarray(shape, kind, block)

    def find(self, view: memoryview | Array) -> Located | None:
        """Return where these bytes lie, None if they are not in the pool."""
        address = address_of(view)
        for region in self._regions:
            if region.has(address, view.nbytes):
                return Located(address, region.registrations)
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(region.nbytes for region in self._regions)

    @property
    def free_nbytes(self) -> int:
        """Bytes of all regions that no array uses."""
        with self._lock:
            self._collect()
            return sum(size for region in self._regions for _, size in region.free)

    def close(self) -> None:
        """Unregister all regions, and share them no more; arrays stay valid as plain memory. Idempotent."""
        with self._lock:
            for region in self._regions:
                region.close()
            self._nics.clear()

    def forked(self) -> None:
        """In a child, start with an empty pool: another thread may have been changing this one."""
        self._lock = threading.Lock()
        self._regions, self._nics, self._returned = [], [], deque()

    def _take(self, nbytes: int) -> tuple[_Region, int]:
        self._volume += nbytes
        if self._volume >= self._review_at:
            self._review()
        region, start = self._find_room(nbytes)
        region.needed(self._volume)
        return region, start

    def _find_room(self, nbytes: int) -> tuple[_Region, int]:
        if self._returned:  # the part that was freed last is usually the one that fits
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
        self._drop([region for region in self._regions if not region.used_nbytes])
        # Some more than asked for, so that vectors that grow, or many vectors, do not take a region each.
        size = self._first_nbytes
        if nbytes > size:
            size = _in_pages(nbytes + nbytes // 4, _HUGE_NBYTES)
        size = max(size, _in_pages(sum(region.used_nbytes for region in self._regions) // 2))
        have = self.nbytes
        if self._max_nbytes is not None and have + size > self._max_nbytes:
            size = _in_pages(nbytes)
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
        self._regions = sorted([*self._regions, region], key=lambda each: each.nbytes)
        self.changes += 1
        return region

    def _review(self) -> None:
        """Drop regions that have not been needed for long, and decide when to look again."""
        self._collect()
        self._drop(
            [
                region
                for region in self._regions
                if not region.used_nbytes and idle(self._volume, region.needed_at, region.touched_nbytes)
            ]
        )
        touched = sum(region.touched_nbytes for region in self._regions)
        self._review_at = self._volume + max(_LEAST_REVIEWED_NBYTES, touched)

    def _drop(self, idle: list[_Region]) -> None:
        if idle:
            self._regions = [region for region in self._regions if region not in idle]
            self.changes += 1
            for region in idle:
                region.close()

    def _collect(self) -> None:
        while self._returned:
            region, start, nbytes = self._returned.popleft()
            region.give_back(start, nbytes)


def private_pool() -> RegisteredPool:
    """A pool of memory that only this process sees."""
    return RegisteredPool(_FIRST_NBYTES, make=PrivateMemory, least_nbytes=_LEAST_NBYTES)


def address_of(view: memoryview | Array) -> int:
    """The address of a contiguous view's first byte."""
    try:
        # This is called for every frame, and numpy takes longer.
        return addressof(c_char.from_buffer(view))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # the view is read-only, or empty
        pass
    array = view if isinstance(view, np.ndarray) else np.frombuffer(view, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


def idle(volume: int, needed_at: int, nbytes: int) -> bool:
    """Whether memory of `nbytes` was not needed while 16 times as many bytes were handed out.

    `volume` is the pool's clock, the bytes handed out so far; `needed_at` is its value at the last need.
    """
    return volume - needed_at > _IDLE_FACTOR * nbytes


def _in_pages(nbytes: int, page_nbytes: int = _PAGE_NBYTES) -> int:
    return -(-nbytes // page_nbytes) * page_nbytes


def _registered(register: Register, region: _Region) -> Registration:
    try:
        return register(region.start, region.nbytes)
    except OSError as error:
        raise FabricError(
            f"an RDMA NIC does not take {region.nbytes >> 20} MiB of memory: {error}; allow this process to "
            f"lock more (ulimit -l, LimitMEMLOCK= of its service), or lower {POOL_SETTING}"
        ) from error
