"""A GPU behind the interface of a device, by torch.cuda; nothing is decided here.

The current device of a new thread is GPU 0, and a call could make a context there, of hundreds of MB for
every process. So each call is made with the right device.
"""

from __future__ import annotations

from typing import Any

import torch

from bml.io.memory import Array, address_of
from bml.topology.errors import FabricError
from bml.torch.devices.device import Mark
from bml.torch.tensors import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all contexts of this process."""


class CudaMark:
    """An event of CUDA that was recorded on a stream of `device`."""

    def __init__(self, device: Any, stream: Any):
        self._device = device
        with torch.cuda.device(device):
            # A thread that waits sleeps; by default it would spin.
            self.event = torch.cuda.Event(blocking=True)
            self.event.record(stream)

    def wait(self) -> None:
        """See Mark."""
        with torch.cuda.device(self._device):
            self.event.synchronize()

    def is_reached(self) -> bool:
        """See Mark."""
        with torch.cuda.device(self._device):
            return bool(self.event.query())


class CudaDevice:
    """See bml.torch.devices.device.Device. `device`: a torch.device("cuda", index)."""

    def __init__(self, device: Any):
        self._device = device
        self._outwards = torch.cuda.Stream(device)
        self._inwards = torch.cuda.Stream(device)
        self._pinned: dict[int, int] = {}
        """The bytes that are locked, by address."""

    def mark(self) -> CudaMark:
        """See Device."""
        return CudaMark(self._device, torch.cuda.current_stream(self._device))

    def follow(self, mark: Mark) -> None:
        """See Device."""
        assert isinstance(mark, CudaMark)
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).wait_event(mark.event)

    def copy_out(self, source: Tensor, into: Tensor, after: Mark) -> CudaMark:
        """See Device."""
        return self._copy(self._outwards, source, into, after, source)

    def copy_in(self, source: Tensor, into: Tensor, after: Mark) -> CudaMark:
        """See Device."""
        return self._copy(self._inwards, source, into, after, into)

    def pin(self, pages: Array) -> None:
        """See Device. Raises FabricError if the memory cannot be locked."""
        address, nbytes = address_of(pages), pages.nbytes
        if self._pinned.get(address) == nbytes:
            return
        if address in self._pinned:  # of memory that vanished without unpin
            self._unlock(address)
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()
            error = cudart.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error):
            raise FabricError(
                f"CUDA cannot lock {nbytes >> 10} KiB of host memory ({_named(error)}); how much a process "
                "may lock is set by ulimit -l, and by LimitMEMLOCK= of its service"
            )
        self._pinned[address] = nbytes

    def unpin(self, pages: Array) -> None:
        """See Device."""
        error = self._unlock(address_of(pages))
        if int(error):
            raise FabricError(f"CUDA cannot unlock {pages.nbytes >> 10} KiB of host memory ({_named(error)})")

    def future(self) -> torch.futures.Future[Any]:
        """See Device."""
        return torch.futures.Future(devices=[self._device])

    def _unlock(self, address: int) -> Any:
        del self._pinned[address]
        with torch.cuda.device(self._device):
            return torch.cuda.cudart().cudaHostUnregister(address)

    def _copy(self, stream: Any, source: Tensor, into: Tensor, after: Mark, of_device: Tensor) -> CudaMark:
        assert isinstance(after, CudaMark)
        with torch.cuda.device(self._device):
            stream.wait_event(after.event)
            # Tensors that were made in inference mode can be written only so.
            with torch.cuda.stream(stream), torch.inference_mode():
                into.copy_(source, non_blocking=True)
            of_device.record_stream(stream)  # its memory is not given to others before the copy
            return CudaMark(self._device, stream)


def _named(error: Any) -> str:
    """An error of CUDA in words."""
    cudart = torch.cuda.cudart()
    return f"{cudart.cudaGetErrorString(cudart.cudaError(int(error)))}, {int(error)}"
