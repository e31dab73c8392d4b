"""A device made of host memory, whose streams run late and in any order that its marks allow.

Tensors made by `tensor` are on the device: the work of its streams alone reads and writes them. A copy reads
its source when it is carried out, which a seed decides. Until then its target holds poison. `bug` plants one
of `BUGS`, as if the code under test forgot something.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bml.io.memory import Array, address_of

BUGS = ("after of copy out", "after of copy in", "wait", "follow", "reached")
"""What is forgotten: the mark that a copy waits for; to wait for a mark; to follow it; a mark not reached."""
_POISON = 0xA5
_BY_THE_WAY = (0, 0, 0, 0, 1, 3)
"""How many pieces of work a call may carry out by the way."""


class FakeMark:
    """A mark in one stream of a fake device."""

    def __init__(self, device: FakeDevice):
        self.device = device
        self.reached = False

    def wait(self) -> None:
        if self.device.bug != "wait":
            self.device.run_until(self)

    def is_reached(self) -> bool:
        self.device.run_some()
        return self.reached or self.device.bug == "reached"


class FakeStream:
    """Work in order; a mark in the queue is waited for if it is another stream's."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()

    def do(self, function: Callable[[], Any]) -> None:
        def carry_out() -> bool:
            function()
            return True

        self.queue.append(carry_out)

    def await_mark(self, mark: FakeMark) -> None:
        self.queue.append(lambda: mark.reached)

    def mark(self, device: FakeDevice) -> FakeMark:
        made = FakeMark(device)
        self.do(lambda: setattr(made, "reached", True))
        return made


class FakeDevice:
    """See bml.torch.devices.device.Device."""

    def __init__(self, seed: int, bug: str = ""):
        assert bug in ("", *BUGS)
        self.bug = bug
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._here = threading.local()
        self._default, self._outwards, self._inwards = FakeStream(), FakeStream(), FakeStream()
        self._streams = [self._default, self._outwards, self._inwards]
        self._held = dict[int, torch.Tensor]()
        self.pinned = dict[int, int]()
        """The pages that are locked: bytes by address."""
        self.violations = list[str]()
        """What was done that no device bears."""
        self._copied = list[tuple[int, FakeMark]]()
        """Addresses in host memory, and the marks of their copies."""

    # --- the interface -----------------------------------------------------------------------------

    def mark(self) -> FakeMark:
        with self._lock:
            self.run_some()
            return self._current.mark(self)

    def follow(self, mark: Any) -> None:
        with self._lock:
            self.run_some()
            if self.bug != "follow":
                self._current.await_mark(mark)

    def copy_out(self, source: torch.Tensor, into: torch.Tensor, after: Any) -> FakeMark:
        assert self.holds(source)
        return self._copy(self._outwards, source, into, after, into)

    def copy_in(self, source: torch.Tensor, into: torch.Tensor, after: Any) -> FakeMark:
        assert self.holds(into)
        return self._copy(self._inwards, source, into, after, source)

    def pin(self, pages: Array) -> None:
        with self._lock:
            self.pinned[address_of(pages)] = pages.nbytes

    def unpin(self, pages: Array) -> None:
        with self._lock:
            start, nbytes = address_of(pages), self.pinned.pop(address_of(pages))
            under_way = [at for at, mark in self._copied if not mark.reached and start <= at < start + nbytes]
            self.violations += ["memory was unlocked while it was copied" for _ in under_way]

    def future(self) -> FakeFuture:
        return FakeFuture(self)

    # --- what a test does with a device ------------------------------------------------------------

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, of the strides of `values`; the current stream gives it their values."""
        made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
        kept = values.clone()
        with self._lock:
            self._held[made.untyped_storage().data_ptr()] = made
        poison(made)
        self.compute(lambda: made.copy_(kept))
        return made

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device; so are its views."""
        return tensor.untyped_storage().data_ptr() in self._held

    def compute(self, function: Callable[[], Any]) -> None:
        """Give a computation to the current stream."""

        def carry_out() -> None:
            with torch.inference_mode():
                function()

        with self._lock:
            self.run_some()
            self._current.do(carry_out)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor of the device, after all that the current stream was given, as `.cpu()`."""
        with self._lock:
            self.run_until(self._current.mark(self))
            return tensor.clone()

    @contextmanager
    def stream(self, stream: FakeStream | None = None) -> Iterator[FakeStream]:
        """Make a stream current in this thread; without one, a new one."""
        with self._lock:
            if stream is None:
                self._streams.append(FakeStream())
                stream = self._streams[-1]
            before, self._here.stream = self._current, stream
        yield stream
        self._here.stream = before

    # --- how it runs -------------------------------------------------------------------------------

    def run_some(self) -> None:
        """Carry out a few pieces of work, or none."""
        with self._lock:
            for _ in range(self._random.choice(_BY_THE_WAY)):
                self._advance()

    def run_until(self, mark: FakeMark) -> None:
        """Carry out work in any order until a mark is reached."""
        with self._lock:
            while not mark.reached:
                assert self._advance(), "streams wait for each other"

    def hang(self) -> None:
        """Let the current stream come to nothing any more that it is given from now on."""
        with self._lock:
            self._current.await_mark(FakeMark(self))

    def run_all(self) -> None:
        """Carry out all work."""
        with self._lock:
            while self._advance():
                pass

    @property
    def _current(self) -> FakeStream:
        found: FakeStream = getattr(self._here, "stream", self._default)
        return found

    def _advance(self) -> bool:
        ahead = [stream for stream in self._streams if stream.queue]
        self._random.shuffle(ahead)
        for stream in ahead:
            if stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def _copy(
        self, stream: FakeStream, source: torch.Tensor, into: torch.Tensor, after: Any, of_host: torch.Tensor
    ) -> FakeMark:
        assert source.shape == into.shape
        assert source.dtype == into.dtype
        assert of_host.is_contiguous()
        outwards = stream is self._outwards
        with self._lock:
            assert not of_host.numel() or self._is_pinned(of_host), "the memory of a copy is not locked"
            self.run_some()
            if outwards:
                poison(into)
            if self.bug != ("after of copy out" if outwards else "after of copy in"):
                stream.await_mark(after)
            if not outwards:
                stream.do(lambda: poison(into))
            stream.do(lambda: _carried_out(source, into))
            mark = stream.mark(self)
            self._copied = [each for each in self._copied if not each[1].reached]
            self._copied.append((of_host.data_ptr(), mark))
        return mark

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(at <= start and end <= at + nbytes for at, nbytes in self.pinned.items())


class FakeFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future with streams, as torch has them for accelerators."""

    def __init__(self, device: FakeDevice):
        super().__init__()
        self._device = device
        self._ready: list[FakeMark] = []

    def then(self, callback: Callable[[Any], Any]) -> FakeFuture:  # type: ignore[override]
        """Run a callback under a stream of its own, which follows what this future was made under."""
        child = FakeFuture(self._device)

        def called(_: Any) -> None:
            with self._device.stream():
                for mark in self._ready:
                    self._device.follow(mark)
                try:
                    value = callback(self)
                except BaseException as error:  # as C++ passes it on
                    child.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
                else:
                    child._ready.append(self._device.mark())
                    child.set_result(value)

        super().then(called)
        return child

    def wait(self) -> Any:
        value = super().wait()
        for mark in self._ready:
            self._device.follow(mark)
        return value


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with bytes that no program means, NaN or not."""
    with torch.inference_mode():
        bits = torch.full((max(tensor.element_size(), 1),), _POISON, dtype=torch.uint8)
        if tensor.dtype is torch.bool:
            tensor.detach().logical_not_()  # it has no other bits
        elif tensor.numel():
            tensor.detach().copy_(bits.view(tensor.dtype)[0])


def _carried_out(source: torch.Tensor, into: torch.Tensor) -> None:
    with torch.inference_mode():
        into.detach().copy_(source.detach())
