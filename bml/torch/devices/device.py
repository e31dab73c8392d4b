"""What bml.torch needs of an accelerator: marks in its work, and copies from and to page-locked host memory.

A device carries out the work of each of its streams in order, and later than it was given. Between streams
only marks make an order. Copies have two streams of their own, one for each direction, so they wait for
nothing but the marks that they are given, and both directions are busy at once.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from bml.io.memory import Array
from bml.torch.tensors import Tensor


class Mark(Protocol):
    """A point in the work that a device was given."""

    def wait(self) -> None:
        """Wait, in the calling thread, until the device has come so far."""
        ...

    def is_reached(self) -> bool:
        """Whether the device has come so far."""
        ...


class Device(Protocol):
    """One accelerator of this process. Methods may be called in any thread; none but `Mark.wait` waits."""

    def mark(self) -> Mark:
        """Mark all that the current stream of the calling thread was given so far."""
        ...

    def follow(self, mark: Mark) -> None:
        """Let what the caller's current stream is given from now on wait for `mark`; the thread goes on."""
        ...

    def copy_out(self, source: Tensor, into: Tensor, after: Mark) -> Mark:
        """Copy a tensor of the device to one in pinned host memory, on the stream outwards.

        Both are of one shape and dtype, `into` is contiguous. The copy waits for `after`. `source` must not
        change, and nobody reads `into`, before the mark that is returned is reached.
        """
        ...

    def copy_in(self, source: Tensor, into: Tensor, after: Mark) -> Mark:
        """Copy a tensor in pinned host memory to one of the device, on the stream inwards.

        Both are of one shape and dtype, `source` is contiguous. The copy waits for `after`; `source` must not
        change before the mark that is returned is reached.
        """
        ...

    def pin(self, pages: Array) -> None:
        """Page-lock host memory, so that copies run beside the threads of the host; no effect if it is so.

        `pages` is an array of uint8 over whole pages in which nothing else lies: a copy may not lie partly in
        locked memory. They must be unlocked before they are given back to an allocator that may unmap them.
        """
        ...

    def unpin(self, pages: Array) -> None:
        """Undo `pin`, when no copy of these pages is under way."""
        ...

    def future(self) -> torch.futures.Future[Any]:
        """A future whose callbacks run under streams of their own on this device.

        A thread that waits for what a callback returned has its current stream follow that of the callback.
        """
        ...
