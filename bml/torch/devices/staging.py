"""Collectives of tensors on a device: the same jobs as in host memory, on twins in page-locked memory.

The inputs are copied out to their twins when a collective is called; the thread of the group waits for the
copies, carries out the job, and has the outputs copied in. All copies wait for what the caller's stream was
given before the call, so they see what it computes, and overwrite nothing that it still reads. An input that
an earlier call of the group still gives its values is copied out later: in the thread, after that call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, Protocol

import torch

from bml.torch.arguments import listed
from bml.torch.collectives import Collectives
from bml.torch.devices.device import Device, Mark
from bml.torch.devices.device_work import DeviceWork
from bml.torch.devices.found import Devices, common
from bml.torch.devices.order import Arrivals
from bml.torch.devices.pinned import PinnedMemory, Slab
from bml.torch.devices.slices import SlicedAllReduce, cut, n_slices
from bml.torch.movements import Job
from bml.torch.steps import GroupSteps
from bml.torch.tensors import Tensor, check_dense, check_writable, describe, is_tensor
from bml.torch.uneven import Counts
from bml.torch.work import GroupWork
from bml.train.operations.places import Empty


class Group(Protocol):
    """What the collectives of a device need of their group."""

    @property
    def counts(self) -> Counts:
        """How many ranks have a batch, in PyTorch's Join."""
        ...

    def rank(self) -> int:
        """This rank."""
        ...

    def size(self) -> int:
        """How many ranks the group has."""
        ...

    def limit_s(self, opts: Any, timeout: timedelta | None) -> float:
        """How long a collective may take."""
        ...

    def put(self, work: GroupWork, call: str, job: Callable[[GroupSteps], None]) -> GroupWork:
        """Put a collective behind those that were begun before."""
        ...


class Staging:
    """The tensors on devices of one group; `empty` makes memory that the group sends without a copy."""

    def __init__(self, group: Group, devices: Devices, empty: Empty):
        self._group = group
        self._devices = devices
        self._empty = empty
        self._memories = dict[Device, PinnedMemory]()
        self._arrivals = Arrivals()

    def device_of(self, arguments: Any, call: str) -> Device | None:
        """The device of the tensors among these arguments, None if they are in host memory.

        Raises UsageError if they are on several, or if a tensor on a device is not dense.
        """
        tensors = list(_tensors(arguments))
        device = common(self._devices, tensors, call)
        if device is not None:
            check_dense(tensors, call)
        return device

    def memory(self, device: Device) -> PinnedMemory:
        """The page-locked memory for a device."""
        return self._memories.setdefault(device, PinnedMemory(device, self._empty))

    def run(
        self, device: Device, name: str, read: int, arguments: Sequence[Any], options: dict[str, Any]
    ) -> GroupWork:
        """Begin the collective of this name, which reads argument number `read`."""
        call = _StagedCall(self._group, device, self.memory(device), self._arrivals)
        try:
            call.take(arguments, read)
            begin: Callable[..., GroupWork] = getattr(call, name)
            return begin(*_mapped(arguments, call.twin), **options)
        except BaseException:
            call.give_back()
            raise

    def close(self, limit_s: float) -> None:
        """Unlock the memory, and let no call copy any more; one of a group that is formed later locks anew.

        A device that hangs is waited for no longer than `limit_s`.
        """
        due_s = time.monotonic() + limit_s
        self._arrivals = Arrivals()
        while self._memories:
            self._memories.popitem()[1].close(max(0.0, due_s - time.monotonic()))


def staged(collective: Callable[..., GroupWork], read: int) -> Any:
    """A method of groups: `collective` of tensors in host memory or on a device; it reads argument `read`."""
    name = collective.__name__

    def begun(group: Any, *arguments: Any, **options: Any) -> GroupWork:
        staging: Staging | None = group.staging
        device = staging.device_of(arguments, name) if staging is not None else None
        if staging is None or device is None:
            return collective(group, *arguments, **options)
        return staging.run(device, name, read, arguments, options)

    @wraps(collective)
    def called(group: Any, *arguments: Any, **options: Any) -> GroupWork:
        return _untraced(begun)(group, *arguments, **options)

    return called


def _untraced(begun: Callable[..., GroupWork]) -> Callable[..., GroupWork]:
    """The function as torch.compile leaves it alone: DDP's C++ calls it in the middle of what is traced.

    Importing the compiler takes seconds, so that is left to whoever compiles.
    """
    if "torch._dynamo" not in sys.modules:
        return begun
    untraced: Callable[..., GroupWork] = torch._disable_dynamo(begun)
    return untraced


class _StagedCall(Collectives):
    """One collective on a device: it is called with the twins, and begins with the copies of its inputs."""

    def __init__(self, group: Group, device: Device, memory: PinnedMemory, arrivals: Arrivals):
        self._group, self._device, self._memory, self._arrivals = group, device, memory, arrivals
        self._slabs = list[Slab]()
        self._last_copy: Mark | None = None

    def take(self, arguments: Sequence[Any], read: int) -> None:
        """Take memory for the twins of all tensors; `give_back` gives it back, also after an error here."""
        given = {id(each): each for each in _tensors(arguments)}
        self._slabs.append(self._memory.take(list(given.values())))
        self._twins = dict(zip(given, self._slabs[0].tensors(list(given.values())), strict=True))
        self._given = {id(twin): given[key] for key, twin in self._twins.items()}
        self._read = list(_tensors(arguments[read : read + 1]))
        self._called = self._device.mark()

    def twin(self, tensor: Tensor) -> Tensor:
        """The twin of a tensor in host memory."""
        return self._twins[id(tensor)]

    @property
    def counts(self) -> Counts:
        return self._group.counts

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def begin(
        self,
        call: str,
        outputs: Sequence[Tensor],
        job: Job,
        opts: Any = None,
        timeout: timedelta | None = None,
        fills: bool = True,
    ) -> GroupWork:
        """Begin a job on the twins, of which it fills `outputs`: those that it leaves are not copied in."""
        targets = [self._given[id(each)] for each in outputs]
        if fills:
            check_writable(targets, call)
        brought = self._brought()

        def on_twins(steps: GroupSteps) -> None:
            for mark in brought():
                mark.wait()
            if job(steps):
                for twin, target in zip(outputs, targets, strict=True):
                    self._copy_in(twin, target)

        return self._put(call, targets, on_twins, opts, timeout)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Reduce a large tensor in slices."""
        twins = listed(tensors)
        how = self.all_reduction(twins, opts)
        n = n_slices(twins[0].nbytes) if len(twins) == 1 else 1
        if n == 1 or not how.op:
            return super().allreduce(tensors, opts, timeout)
        target = self._given[id(twins[0])]
        check_writable([target], "all_reduce")
        self._slabs.append(self._memory.take(twins))
        (result,) = self._slabs[1].tensors(twins)
        brought = self._brought(n)
        targets = cut(target.detach().view(-1), n) if target.is_contiguous() else []

        def on_twins(steps: GroupSteps) -> None:
            given, results = cut(twins[0].view(-1), n), cut(result.view(-1), n)
            marks = brought()
            marks = marks if len(marks) == n else marks * n
            sliced = SlicedAllReduce(how, describe(twins), marks, given, results, targets, self._copy_in)
            sliced.run(steps)
            if not targets:
                self._copy_in(result, target)

        return self._put("all_reduce", [target], on_twins, opts, timeout)

    def give_back(self) -> None:
        """Give back the memory, which is used until all copies were carried out."""
        while self._slabs:
            self._memory.give_back(self._slabs.pop())

    def _brought(self, n: int = 1) -> Callable[[], list[Mark]]:
        """Copy the inputs out, in n slices where they are contiguous; call it in the thread for the marks.

        If an earlier call gives one of them its values, all are copied only there.
        """
        earlier = self._arrivals.of(self._read)
        if not earlier:
            marks = self._copied_out(n)
            return lambda: marks

        def copied_late() -> list[Mark]:
            for each in earlier:
                each.wait()
            return self._copied_out(n)

        return copied_late

    def _copied_out(self, n: int) -> list[Mark]:
        sources = [plain(each) for each in self._read]
        computed = any(each.is_conj() or each.is_neg() for each in self._read)
        after = self._device.mark() if computed else self._called
        marks = list[Mark]()
        for source, given in zip(sources, self._read, strict=True):
            parts = [(source, self.twin(given))]
            if n > 1 and source.is_contiguous():
                parts = list(zip(*(cut(each.view(-1), n) for each in parts[0]), strict=True))
            marks += [self._memory.copy_out(self._slabs[0], *each, after) for each in parts]
        self._last_copy = marks[-1] if marks else None
        return marks

    def _copy_in(self, twin: Tensor, target: Tensor) -> Mark:
        # Of two slabs the second one has the results.
        self._last_copy = self._memory.copy_in(self._slabs[-1], twin, target, self._called)
        return self._last_copy

    def _put(
        self,
        call: str,
        targets: list[Tensor],
        on_twins: Callable[[GroupSteps], None],
        opts: Any,
        timeout: timedelta | None,
    ) -> GroupWork:
        work = DeviceWork(call, targets, self._group.limit_s(opts, timeout), self._device)
        arrival = self._arrivals.expect(targets)

        def job(steps: GroupSteps) -> None:
            try:
                on_twins(steps)
                work.came = self._last_copy
            finally:
                arrival.is_under_way(self._last_copy)
                self.give_back()

        try:
            return self._group.put(work, call, job)
        except BaseException:
            arrival.is_under_way(None)
            raise


def plain(tensor: Tensor) -> Tensor:
    """The tensor without its history, and with its values as they are in memory."""
    return tensor.detach().resolve_conj().resolve_neg()


def _tensors(argument: Any) -> Iterator[Tensor]:
    """The tensors in lists of lists."""
    if is_tensor(argument):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from _tensors(each)


def _mapped(argument: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, with others in the places of tensors."""
    if is_tensor(argument):
        return function(argument)
    if isinstance(argument, list | tuple):
        return [_mapped(each, function) for each in argument]
    return argument
