"""The accelerators of this process, one object for each, by where tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bml.topology.errors import UsageError
from bml.torch.devices.cuda import CudaDevice
from bml.torch.devices.device import Device

MAKERS: dict[str, Callable[[Any], Device]] = {"cuda": CudaDevice}
"""The type of a torch.device -> what makes the object for one."""
_made: dict[Any, Device] = {}


def device_at(where: Any) -> Device | None:
    """Return the device of tensors whose `device` is `where`; None for host memory.

    Raises UsageError for accelerators that bml does not know.
    """
    if where.type == "cpu":
        return None
    if where not in _made:
        if where.type not in MAKERS:
            raise UsageError(
                f"the backend bml takes tensors in host memory, and on GPUs of CUDA, not on {where}: give "
                "tensor.cpu()"
            )
        _made.setdefault(where, MAKERS[where.type](where))
    return _made[where]
