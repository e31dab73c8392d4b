"""A collective of tensors on a device: its callers' streams wait for the results, their threads do not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from bml.torch.devices.device import Device, Mark
from bml.torch.tensors import Tensor
from bml.torch.work import GroupWork


class DeviceWork(GroupWork):
    """Over once its results are on their way to the device; `came` is the mark behind them.

    A thread that waits has its current stream follow that mark, and so has a callback of the future.
    """

    def __init__(self, call: str, outputs: Sequence[Tensor], limit_s: float, device: Device):
        self._device = device
        self.came: Mark | None = None
        super().__init__(call, outputs, limit_s)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """See GroupWork; what the caller's current stream is given from now on sees the results."""
        super().wait(timeout)
        self._follow()
        return True

    def is_completed(self) -> bool:
        """Whether its results are on the device, or it failed."""
        return super().is_completed() and (self.came is None or self.came.is_reached())

    def is_success(self) -> bool:
        """Whether its results are on the device, and it did not fail."""
        return super().is_success() and self.is_completed()

    def _new_future(self) -> Any:
        return self._device.future()

    def _value(self, settled: Any) -> list[Tensor]:
        outputs = super()._value(settled)
        self._follow()
        return outputs

    def _follow(self) -> None:
        if self.came is not None:
            self._device.follow(self.came)
