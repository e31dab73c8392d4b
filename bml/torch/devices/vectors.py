"""Vectors in the session's memory that are filled from tensors, and whose means go back to where these are.

A vector of tensors on an accelerator lies in page-locked memory. It is filled, and means are taken, by copies
that go on beside all threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Protocol

import torch

from bml.io.memory import Array
from bml.torch.devices.device import Device, Mark
from bml.torch.devices.pages import whole_pages
from bml.torch.devices.registry import device_at
from bml.torch.tensors import Tensor, norm
from bml.train.operations.places import Empty

Shapes = Sequence[tuple[int, ...]]
Dtype = Any
"""A torch.dtype."""


class Vector(Protocol):
    """The parts of a vector lie one after the other; `array` is all of it, shape (n,)."""

    array: Array

    def put(self, place: int, tensor: Tensor) -> None:
        """Set a part to the values of a tensor of its shape, which does not change any more."""
        ...

    def begin(self, as_zeros: bool) -> Callable[[], None] | None:
        """All was put: return what waits until `array` may be read, or None if it may be read now.

        With `as_zeros` the array is all zeros then.
        """
        ...

    def norm(self) -> float:
        """The norm of what was put."""
        ...

    def take(self, mean: Array) -> list[Tensor]:
        """Return the parts of a vector as tensors in the dtype and at the place of the mean; `array` is free.

        On an accelerator they lie in memory that the next call writes.
        """
        ...


def vector_on(where: Any, shapes: Shapes, dtypes: tuple[Dtype, Dtype], empty: Empty) -> Vector:
    """Make a vector for tensors that lie on the torch.device `where`.

    `dtypes` are its own and that of the means, which has as many bits or fewer. `empty` makes the memory.
    Raises UsageError for accelerators that bml does not know.
    """
    device = device_at(where)
    if device is None:
        return _HostVector(shapes, dtypes, empty)
    return _DeviceVector(device, where, shapes, dtypes, empty)


class _HostVector:
    """See Vector."""

    def __init__(self, shapes: Shapes, dtypes: tuple[Dtype, Dtype], empty: Empty):
        dtype, self._mean_dtype = dtypes
        self._shapes = shapes
        self.array = empty(sum(map(prod, shapes)), str(dtype).removeprefix("torch."))
        self._flat = torch.from_numpy(self.array)
        self._parts = _shaped(self._flat, shapes)

    def put(self, place: int, tensor: Tensor) -> None:
        """See Vector."""
        with torch.no_grad():
            self._parts[place].copy_(tensor)

    def begin(self, as_zeros: bool) -> None:
        """See Vector."""
        if as_zeros:
            self._flat.zero_()

    def norm(self) -> float:
        """See Vector."""
        return norm(self._flat)

    def take(self, mean: Array) -> list[Tensor]:
        """See Vector."""
        return _shaped(torch.from_numpy(mean).to(self._mean_dtype), self._shapes)


class _DeviceVector:
    """See Vector. No thread waits for copies out but that which calls what `begin` returned."""

    def __init__(self, device: Device, where: Any, shapes: Shapes, dtypes: tuple[Dtype, Dtype], empty: Empty):
        dtype, mean_dtype = dtypes
        self._device, self._dtype = device, dtype
        n_elements = sum(map(prod, shapes))
        pages = whole_pages(n_elements * dtype.itemsize, empty)
        self.array = pages[: n_elements * dtype.itemsize].view(str(dtype).removeprefix("torch."))
        self._flat = torch.from_numpy(self.array)
        self._parts = _shaped(self._flat, shapes)
        self._means = torch.empty(n_elements, dtype=mean_dtype, device=where)
        self._shaped_means = _shaped(self._means, shapes)
        self._last: dict[str, Mark] = {}
        """The marks of the last copy in each direction."""
        device.pin(pages)
        weakref.finalize(self, _unpin, device, pages, self._last).atexit = False

    def put(self, place: int, tensor: Tensor) -> None:
        """See Vector."""
        device = self._device
        taken = self._last.pop("in", None)
        if taken is not None:  # the means of before were copied from this memory
            taken.wait()
        with torch.no_grad():
            source = tensor.detach().to(self._dtype).contiguous()
        self._last["out"] = device.copy_out(source, self._parts[place], device.mark())

    def begin(self, as_zeros: bool) -> Callable[[], None]:
        """See Vector."""
        # Copies outwards are carried out in order, so the last one is there after all others.
        last = self._last["out"]

        def wait() -> None:
            last.wait()
            if as_zeros:
                self._flat.zero_()

        return wait

    def norm(self) -> float:
        """See Vector."""
        self._last["out"].wait()
        return norm(self._flat)

    def take(self, mean: Array) -> list[Tensor]:
        """See Vector."""
        # Means of 16 bits are rounded before they are copied, into the first half of the same memory.
        rounded = self._flat.view(self._means.dtype)[: self._means.numel()]
        rounded.copy_(torch.from_numpy(mean))
        device = self._device
        self._last["in"] = device.copy_in(rounded, self._means, device.mark())
        device.follow(self._last["in"])
        return self._shaped_means


def _unpin(device: Device, pages: Array, last: dict[str, Mark]) -> None:
    with suppress(Exception):  # a device that has failed; its error was raised where it was waited for
        for mark in last.values():
            mark.wait()
        device.unpin(pages)


def _shaped(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    """The tensors of these shapes that lie in a flat one."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
