"""The accelerators of this process, found by the tensors that are on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bml.topology.errors import UsageError
from bml.torch.devices.device import Device
from bml.torch.devices.registry import device_at
from bml.torch.tensors import Tensor


class Devices(Protocol):
    """Finds the device on which a tensor is."""

    def find(self, tensor: Tensor) -> Device | None:
        """The device; None for host memory. Raises UsageError for a device that is not supported."""
        ...


class CudaDevices:
    """The GPUs of this process."""

    def find(self, tensor: Tensor) -> Device | None:
        """See Devices."""
        return device_at(tensor.device)


def available() -> Devices | None:
    """The accelerators of this machine, None if there is none that is supported."""
    return CudaDevices() if torch.cuda.is_available() else None


def common(devices: Devices, tensors: Sequence[Tensor], call: str) -> Device | None:
    """The device of all these tensors, None if they are in host memory.

    Raises UsageError if they are on several, or on one that is not supported.
    """
    found = list[Device | None]()
    for each in tensors:
        device = devices.find(each)
        if device not in found:
            found.append(device)
    if len(found) > 1:
        names = ", ".join(sorted({str(each.device) for each in tensors}))
        raise UsageError(f"{call} was given tensors on different devices ({names}): move them to one")
    return found[0] if found else None
