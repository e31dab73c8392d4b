"""A GPU behind the interface of a device, by torch.cuda; nothing is decided here."""

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
    """An event of CUDA that was recorded."""

    def __init__(self, stream: Any):
        # A thread that waits sleeps; by default it would spin.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()

    def is_reached(self) -> bool:
        """See Mark."""
        return bool(self.event.query())


class CudaDevice:
    """See bml.torch.devices.device.Device. `device`: a torch.device("cuda", index)."""

    def __init__(self, device: Any):
        self._device = device
        self._outwards = torch.cuda.Stream(device)
        self._inwards = torch.cuda.Stream(device)
        self._pinned = set[int]()

    def mark(self) -> CudaMark:
        """See Device."""
        return CudaMark(torch.cuda.current_stream(self._device))

    def follow(self, mark: Mark) -> None:
        """See Device."""
        assert isinstance(mark, CudaMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def copy_out(self, source: Tensor, into: Tensor, after: Mark) -> CudaMark:
        """See Device."""
        return self._copy(self._outwards, source, into, after, source)

    def copy_in(self, source: Tensor, into: Tensor, after: Mark) -> CudaMark:
        """See Device."""
        return self._copy(self._inwards, source, into, after, into)

    def pin(self, pages: Array) -> None:
        """See Device. Raises FabricError if the memory cannot be locked."""
        address = address_of(pages)
        if address in self._pinned:
            return
        with torch.cuda.device(self._device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, pages.nbytes, _PORTABLE))
        if error:
            raise FabricError(
                f"CUDA cannot lock {pages.nbytes >> 10} KiB of host memory (error {error}): allow this "
                "process to lock more (ulimit -l, LimitMEMLOCK= of its service)"
            )
        self._pinned.add(address)

    def unpin(self, pages: Array) -> None:
        """See Device."""
        address = address_of(pages)
        self._pinned.remove(address)
        with torch.cuda.device(self._device):
            error = int(torch.cuda.cudart().cudaHostUnregister(address))
        if error:
            raise FabricError(f"CUDA cannot unlock {pages.nbytes >> 10} KiB of host memory (error {error})")

    def future(self) -> torch.futures.Future[Any]:
        """See Device."""
        return torch.futures.Future(devices=[self._device])

    def _copy(self, stream: Any, source: Tensor, into: Tensor, after: Mark, of_device: Tensor) -> CudaMark:
        assert isinstance(after, CudaMark)
        stream.wait_event(after.event)
        # Threads of bml have no device of their own: without the first, leaving the stream would make them
        # use GPU 0. And tensors that were made in inference mode can be written only so.
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.inference_mode():
            into.copy_(source, non_blocking=True)
        of_device.record_stream(stream)  # its memory is not given to others before the copy
        return CudaMark(stream)
