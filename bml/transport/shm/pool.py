"""Pools of memory for servers of one host: one that others may read, and one for results of one's own."""

from __future__ import annotations

import mmap

from bml.transport.memory import Array, RegisteredPool, address_of
from bml.transport.shm.board import InputPlace
from bml.transport.shm.segment import Segment

_REGION_NBYTES = 64 << 20


class SharedPool(RegisteredPool):
    """Memory whose arrays are contributed without a copy: all servers of the host can read them in place."""

    def __init__(self, nbytes: int = _REGION_NBYTES) -> None:
        self._segments: list[Segment] = []
        super().__init__(nbytes, make=self._make_segment)

    def locate(self, array: Array) -> InputPlace | None:
        """Where others find a contiguous array, or None if it is not the pool's."""
        address = address_of(array)
        for segment in self._segments:
            if segment.start <= address and address + array.nbytes <= segment.start + segment.address.nbytes:
                return InputPlace(segment.address, address - segment.start)
        return None

    @property
    def segments(self) -> list[Segment]:
        """All its memory; only ever more of it."""
        return self._segments

    def close(self) -> None:
        """Let nobody open its memory any more; arrays stay valid. Idempotent."""
        super().close()
        for segment in self._segments:
            segment.close()

    def _make_segment(self, nbytes: int) -> mmap.mmap:
        segment = Segment(nbytes)
        self._segments.append(segment)
        return segment.memory


def result_pool() -> RegisteredPool:
    """Memory for results, used again when they are dropped: fresh memory costs as much as the copy."""
    return RegisteredPool(_REGION_NBYTES, make=_huge_pages)


def _huge_pages(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
