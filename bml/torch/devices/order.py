"""Order between collectives of one tensor that are begun without a wait between them.

A call that reads what an earlier one gives must not copy it out at once: the earlier one may not even have
begun. The thread of the group carries out calls in order, so there the results are on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from bml.torch.devices.device import Mark
from bml.torch.tensors import Tensor


class Arrival:
    """The results of one call, from the call until they are on the device."""

    def __init__(self, targets: Sequence[Tensor]):
        self.memory = {_memory_of(each) for each in targets}
        self._mark: Mark | None = None
        self._is_over = False

    def is_under_way(self, mark: Mark | None) -> None:
        """Say that the call is over, or failed; `mark` is behind its copies, None if it has none."""
        self._mark = mark
        self._is_over = True

    def has_come(self) -> bool:
        """Whether nothing will write the results any more."""
        return self._is_over and (self._mark is None or self._mark.is_reached())

    def wait(self) -> None:
        """Wait for the results of a call that is over."""
        if self._mark is not None:
            self._mark.wait()


class Arrivals:
    """The results that the calls of one group still owe. Methods may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: list[Arrival] = []

    def expect(self, targets: Sequence[Tensor]) -> Arrival:
        """Say that a call is going to write these tensors."""
        arrival = Arrival(targets)
        with self._lock:
            self._expected.append(arrival)
        return arrival

    def of(self, tensors: Sequence[Tensor]) -> list[Arrival]:
        """The results still expected in memory of these tensors."""
        memory = {_memory_of(each) for each in tensors}
        with self._lock:
            self._expected = [each for each in self._expected if not each.has_come()]
            return [each for each in self._expected if each.memory & memory]


def _memory_of(tensor: Tensor) -> int:
    """Where the storage begins, which a tensor shares with its views."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
