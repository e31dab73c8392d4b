"""Page-locked host memory, kept between calls: to lock a page takes longer than to copy it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
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

_abandoned: list[Slab] = []
"""Locked memory that calls still had when their group ended: nobody else may get it."""


class Slab:
    """Pages that are locked, for one call at a time."""

    def __init__(self, pages: Array):
        self.pages = pages
        self.until: Sequence[Mark] = ()
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
            if self._closed:
                raise UsageError("the process group was destroyed: nothing can begin in it any more")
            self._volume += wanted
            slab = self._fitting(wanted) or self._made(wanted)
            slab.needed_at, slab.until = self._volume, ()
            self._used.append(slab)
            self._give_up_idle()
        return slab

    def give_back(self, slab: Slab, until: Sequence[Mark]) -> None:
        """Take a slab back, whose memory is used until these marks are reached."""
        with self._lock:
            self._used.remove(slab)
            slab.until = until
            self._free.append(slab)
            if self._closed:
                _abandoned.remove(slab)
                self._give_up(slab)

    def close(self) -> None:
        """Unlock all memory, after the copies that are under way; what is in use when it is given back."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _abandoned.extend(self._used)
                for slab in list(self._free):
                    self._give_up(slab)

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
                self._give_up(slab)

    def _give_up(self, slab: Slab) -> None:
        for mark in slab.until:
            mark.wait()
        self._free.remove(slab)
        self._device.unpin(slab.pages)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
