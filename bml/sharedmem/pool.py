"""Memory that others of this host may read: what lies there is contributed, or sent, without a copy."""

from __future__ import annotations

from bml.io.mapping import OwnMemory
from bml.io.memory import Array, RegisteredPool, address_of
from bml.sharedmem.segment import Segment
from bml.sharedmem.status_page import InputPlace

_FIRST_NBYTES = 8 << 20


class SharedPool(RegisteredPool):
    """Memory whose arrays all servers of the host can read in place."""

    def __init__(self, nbytes: int = _FIRST_NBYTES, least_nbytes: int = 0) -> None:
        super().__init__(nbytes, make=Segment, least_nbytes=least_nbytes)

    def locate(self, array: Array) -> InputPlace | None:
        """Where others find a contiguous array, or None if it is not the pool's."""
        address = address_of(array)
        for region in self._regions:
            if region.has(address, array.nbytes):
                return InputPlace(_segment(region.memory).address, address - region.start, self.changes)
        return None

    @property
    def segments(self) -> list[Segment]:
        """All its memory of now."""
        return [_segment(region.memory) for region in self._regions]


def _segment(memory: OwnMemory) -> Segment:
    assert isinstance(memory, Segment)
    return memory
