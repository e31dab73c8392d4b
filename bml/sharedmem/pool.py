"""A pool of memory that other servers of the host can read: arrays in it are contributed without a copy."""

from __future__ import annotations

from bml.io.mapping import OwnMemory
from bml.io.memory import Array, RegisteredPool, address_of
from bml.sharedmem.segment import Segment
from bml.sharedmem.status_page import InputPlace

_FIRST_NBYTES = 8 << 20


class SharedPool(RegisteredPool):
    """A `RegisteredPool` whose arrays all servers of the host can read in place.

    Raises FabricError when there is not enough memory.
    """

    def __init__(self, nbytes: int = _FIRST_NBYTES, least_nbytes: int = 0) -> None:
        super().__init__(nbytes, make=Segment, least_nbytes=least_nbytes)

    def locate(self, array: Array) -> InputPlace | None:
        """Where other servers find a contiguous array; None if it is not in the pool."""
        address = address_of(array)
        for region in self._regions:
            if region.has(address, array.nbytes):
                return InputPlace(_segment(region.memory).address, address - region.start, self.changes)
        return None

    @property
    def segments(self) -> list[Segment]:
        """The present memory of the pool."""
        return [_segment(region.memory) for region in self._regions]


def _segment(memory: OwnMemory) -> Segment:
    assert isinstance(memory, Segment)
    return memory
