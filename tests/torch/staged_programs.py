"""Scripts of ranks whose tensors in host memory are taken for tensors of a device that copies at once.

Gradients of DDP go through page-locked memory then, and through the futures that DDP waits for in C++.
"""

from __future__ import annotations

from typing import Any

import rank_programs
import torch
from device_programs import OneDevice
from fake_device import FakeDevice, FakeMark

from bml.torch import process_group
from bml.torch.devices import slices

SMALL_BASE_NBYTES = 256


class EagerDevice(FakeDevice):
    """A device that has all tensors, and carries out what it is given before it returns."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def mark(self) -> FakeMark:
        return self._done(super().mark())

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: Any) -> FakeMark:
        return self._done(super().copy_out(source, into, after))

    def copy_in(self, source: torch.Tensor, into: torch.Tensor, after: Any) -> FakeMark:
        return self._done(super().copy_in(source, into, after))

    def future(self) -> Any:
        return torch.futures.Future()

    def _done(self, mark: FakeMark) -> FakeMark:
        self.run_all()
        return mark


def train(**arguments: Any) -> dict[str, Any]:
    """Plain DDP, with small buckets in slices; also what is still locked when the group was destroyed."""
    device = EagerDevice(1)
    process_group.available = lambda: OneDevice(device)
    slices._BASE_NBYTES = SMALL_BASE_NBYTES
    n_pinned = 0

    def pin(pages: Any) -> None:
        nonlocal n_pinned
        n_pinned += 1
        FakeDevice.pin(device, pages)

    device.pin = pin  # type: ignore[method-assign]
    found = rank_programs.train("bml", **arguments)
    return {**found, "pinned": n_pinned, "left": len(device.pinned), "violations": device.violations}
