"""Page-locked host memory, kept between calls: to lock a page takes longer than to copy it."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from bml.io.memory import Array, idle
from bml.topology.errors import UsageError
from bml.torch.devices.device import Device, Mark
from bml.torch.devices.pages import whole_pages
from bml.torch.tensors import Tensor
from bml.train.operations.places import Empty

_ALIGN_NBYTES = 64
_LARGEST_FACTOR = 2
"""A slab is used for what needs at least half of it."""
_LOOK_S = 0.001
"""How often it is seen whether copies were carried out, in seconds."""

_abandoned: list[Slab] = []
"""Locked memory that was still copied when its group ended: nobody else may get it."""


class Slab:
    """Pages that are locked, for one call at a time."""

    def __init__(self, pages: Array):
        self.pages = pages
        self.until = list[Mark]()
        """The copies of its last use."""
        self.needed_at = 0
        """The clock of its memory when it was used last."""

    @property
    def is_free(self) -> bool:
        """Whether the copies of its last use were carried out."""
        return all(mark.is_reached() for mark in self.until)

    def tensors(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors in it, of the shapes and dtypes of these."""
        sizes = [_aligned(each.nbytes) for each in like]
        starts = accumulate(sizes, initial=0)
        return [
            torch.from_numpy(self.pages[start : start + each.nbytes]).view(each.dtype).view(each.shape)
            for start, each in zip(starts, like, strict=False)
        ]


class PinnedMemory:
    """Slabs of memory of `empty` that are locked for `device`. Methods may be called in any thread.

    A slab that was not needed while 16 times its bytes were taken is given up.
    """

    def __init__(self, device: Device, empty: Empty):
        self._device = device
        self._empty = empty
        self._lock = threading.Lock()
        self._free: list[Slab] = []
        self._used: list[Slab] = []
        self._volume = 0
        self._closed = False

    def take(self, like: Sequence[Tensor]) -> Slab:
        """A slab with room for tensors like these.

        Raises FabricError if no more memory can be locked, UsageError after `close`.
        """
        wanted = sum(_aligned(each.nbytes) for each in like)
        with self._lock:
            self._check_open()
            self._volume += wanted
            slab = self._fitting(wanted) or self._made(wanted)
            slab.needed_at, slab.until = self._volume, []
            self._used.append(slab)
            self._give_up_idle()
        return slab

    def copy_out(self, slab: Slab, source: Tensor, into: Tensor, after: Mark) -> Mark:
        """`Device.copy_out` into a tensor of a slab. Raises UsageError after `close`."""
        return self._copied(slab, lambda: self._device.copy_out(source, into, after))

    def copy_in(self, slab: Slab, source: Tensor, into: Tensor, after: Mark) -> Mark:
        """`Device.copy_in` of a tensor of a slab. Raises UsageError after `close`."""
        return self._copied(slab, lambda: self._device.copy_in(source, into, after))

    def give_back(self, slab: Slab) -> None:
        """Take a slab back, whose memory is used until its copies were carried out."""
        with self._lock:
            if not self._closed:
                self._used.remove(slab)
                self._free.append(slab)
            elif slab in _abandoned and slab.is_free:
                _abandoned.remove(slab)
                self._device.unpin(slab.pages)

    def close(self, limit_s: float) -> None:
        """Unlock all memory, also that in use, after the copies that are under way; there are none later.

        What is still copied after `limit_s` stays locked, as if the device had failed: nobody else gets it.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            slabs = [*self._free, *self._used]
        due_s = time.monotonic() + limit_s
        for slab in slabs:  # without the lock: calls that end need not wait for a device that hangs
            try:
                self._unlock(slab, due_s)
            except Exception:  # the device has failed, and says so where its results are awaited
                _abandoned.append(slab)

    def _copied(self, slab: Slab, begin: Callable[[], Mark]) -> Mark:
        with self._lock:  # `close` waits for each copy, or comes before it
            self._check_open()
            slab.until.append(begin())
        return slab.until[-1]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the process group was destroyed: nothing can begin in it any more")

    def _unlock(self, slab: Slab, due_s: float) -> None:
        while not slab.is_free:
            if time.monotonic() > due_s:
                raise TimeoutError
            time.sleep(_LOOK_S)
        self._device.unpin(slab.pages)

    def _fitting(self, wanted: int) -> Slab | None:
        largest = max(_LARGEST_FACTOR * wanted, mmap.PAGESIZE)
        for slab in self._free:
            if wanted <= slab.pages.nbytes <= largest and slab.is_free:
                self._free.remove(slab)
                return slab
        return None

    def _made(self, wanted: int) -> Slab:
        pages = whole_pages(wanted, self._empty)
        self._device.pin(pages)
        return Slab(pages)

    def _give_up_idle(self) -> None:
        for slab in list(self._free):
            if idle(self._volume, slab.needed_at, slab.pages.nbytes) and slab.is_free:
                self._free.remove(slab)
                self._device.unpin(slab.pages)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
