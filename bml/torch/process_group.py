"""A process group of torch.distributed whose collectives are steps of bml: they survive the loss of ranks.

Every method takes the arguments that torch.distributed gives, in PyTorch's words, and returns a Work at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy.typing as npt
import torch
import torch.distributed as dist

from bml.cluster.formation.program_end import is_failure
from bml.protocol.server.transfer import SegmentedBytes
from bml.topology.errors import UsageError
from bml.torch.collectives import Collectives
from bml.torch.devices import staged_messages
from bml.torch.devices.device import Device
from bml.torch.devices.found import Devices, available
from bml.torch.devices.pinned import PinnedMemory
from bml.torch.devices.staging import Staging, staged
from bml.torch.messages import ANY, Messages, Messenger, single
from bml.torch.steps import GroupSteps, Vector
from bml.torch.tensors import Tensor, check_writable
from bml.torch.uneven import Counts
from bml.torch.work import GroupWork, WorkThread
from bml.train.communicator import Communicator

Value = TypeVar("Value")

BACKWARD = "backward"  # the reduction of a hook that leaves no rank's part out
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", BACKWARD)

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""As torch.distributed's own for gloo."""
_LEAVE_S = 1.0
"""How long an abort waits for copies from and to devices."""


class ProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]  # PyTorch is untyped here
    """One rank's part in a group whose steps `communicator` carries out; rank r is its server r.

    `timeout` limits waits for collectives that a live rank does not call. `on_shutdown` is called once, with
    True if the group ends in order, when it is destroyed. `messenger` carries messages between two ranks. A
    group without a communicator is opened later. `devices` are the accelerators whose tensors it takes, None:
    those of this machine.
    """

    supports_coalescing = supports_splitting = False

    def __init__(
        self,
        communicator: Communicator | None,
        rank: int,
        size: int,
        store: Any = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        on_shutdown: Callable[[bool], None] | None = None,
        messenger: Messenger | None = None,
        devices: Devices | None = None,
    ):
        super().__init__(rank, size)  # PyTorch keeps no store of a group in Python
        self._store = store
        self._group_name = self._group_desc = "undefined"
        self._limit_s = timeout.total_seconds()
        self._thread = WorkThread(f"bml-group-{rank}")
        self._on_shutdown = on_shutdown
        self._messages = Messages(messenger, rank, self._limit_s)
        self._counts = Counts()
        devices = devices or available()
        self.staging = None if devices is None else Staging(self, devices, self._empty)
        if communicator is not None:
            self._steps = GroupSteps(communicator, rank, size)

    # --- what it is ------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """Its name in PyTorch."""
        return "bml"

    # PyTorch keeps these two with the C++ backends of a group, of which this one has none.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Name the group, as PyTorch finds it by this name."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name that PyTorch gave it."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """Describe the group."""
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description that PyTorch gave it."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        """PyTorch keeps objects and states where its groups can send them from."""
        names = ["cpu"] if self.staging is None else ["cpu", "cuda"]
        return [torch.device(name) for name in names]

    def _get_backend(self, device: Any) -> ProcessGroup:
        """PyTorch asks it what it supports."""
        return self

    def get_group_store(self) -> Any:
        """The store over which the group was formed."""
        return self._store

    @property
    def counts(self) -> Counts:
        """How many ranks have a batch, in PyTorch's Join."""
        return self._counts

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks of the group whose parts are in the last result; at first all."""
        return self._steps.contributors

    # --- collectives, of tensors in host memory or on a device -------------------------------------

    allreduce = allreduce_coalesced = staged(Collectives.allreduce, read=0)
    reduce = staged(Collectives.reduce, read=0)
    reduce_scatter = staged(Collectives.reduce_scatter, read=1)
    reduce_scatter_single = _reduce_scatter_base = staged(Collectives.reduce_scatter_single, read=1)
    reduce_scatter_single_coalesced = staged(Collectives.reduce_scatter_single_coalesced, read=1)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    broadcast = staged(Collectives.broadcast, read=0)
    allgather = staged(Collectives.allgather, read=1)
    all_gather_single = _allgather_base = staged(Collectives.all_gather_single, read=1)
    all_gather_single_coalesced = staged(Collectives.all_gather_single_coalesced, read=1)
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    allgather_coalesced = staged(Collectives.allgather_coalesced, read=1)
    gather = staged(Collectives.gather, read=1)
    scatter = staged(Collectives.scatter, read=1)
    alltoall = staged(Collectives.alltoall, read=1)
    all_to_all_single = alltoall_base = staged(Collectives.all_to_all_single, read=1)

    # --- messages between two ranks ----------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> GroupWork:
        """Send a tensor to one rank; messages pass collectives by."""
        found = self._staging_for("send", tensors)
        if found is None:
            return self._messages.send(tensors, to, tag)
        return staged_messages.send(self._messages, *found, single(tensors, "send"), to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> GroupWork:
        """Receive a tensor of the same size from one rank, in the order in which it was sent."""
        found = self._staging_for("recv", tensors)
        if found is None:
            return self._messages.recv(tensors, source, tag)
        return staged_messages.recv(self._messages, *found, single(tensors, "recv"), source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> GroupWork:
        """The same from any rank; the work's `source_rank` says from which."""
        return self.recv(tensors, ANY, tag)

    # --- a rank that was started again -------------------------------------------------------------

    @property
    def joins(self) -> bool:
        """Whether this rank was started again, while the others went on."""
        return self._steps.communicator.joins

    def joined(self) -> memoryview | None:
        """Wait for the others' training state, if this rank joins and needs one now; else None.

        Raises the error that ended the group.
        """
        return self._between(lambda: self._steps.communicator.joined())

    @property
    def is_alone(self) -> bool:
        """Whether this rank joins, and takes no part in the others' steps yet."""
        return self._steps.is_alone

    def is_among(self, contributors: tuple[int, ...]) -> None:
        """From now on this rank takes part in the others' steps; these contribute to them."""
        self._steps.contributors, self._steps.is_alone = contributors, False

    def stand_aside(self) -> None:
        """This rank has fallen behind, and is alone until it has taken a later state."""
        self._steps.is_alone = True

    def boundary(self, state: Callable[[], SegmentedBytes]) -> None:
        """Pass the boundary between two iterations: ranks that join are sent `state()`."""

        def between() -> None:
            self._steps.communicator.boundary(state)
            self._steps.communicator.begin_iteration()

        self._between(between)

    def _between(self, function: Callable[[], Value]) -> Value:
        """Call a function in the thread of the group, after all that was begun, and return its result."""
        found = list[Value]()

        def carry_out() -> int:
            found.append(function())
            return -1

        self._thread.begin(carry_out, GroupWork("a boundary", [], threading.TIMEOUT_MAX)).wait()
        return found[0]

    # --- the end ---------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what was begun, then let the others know that this rank is done. Idempotent.

        While an exception passes by, as in `finally: destroy_process_group()`, this rank counts as lost.
        """
        self._end(not is_failure(sys.exc_info()[1]))

    def abort(self) -> None:
        """End at once: for the others this rank is lost. Idempotent."""
        self._end(False)

    def _end(self, in_order: bool) -> None:
        on_shutdown, self._on_shutdown = self._on_shutdown, None
        in_order &= self._thread.close(self._limit_s if in_order else 0)
        try:
            if self.staging is not None:  # its pages may be given up, which devices must not have locked then
                self.staging.close(self._limit_s if in_order else _LEAVE_S)
        finally:
            if on_shutdown is not None:
                on_shutdown(in_order)
        self._messages.close()

    # --- small parts -----------------------------------------------------------------------------

    def _staging_for(self, call: str, tensors: Any) -> tuple[Device, PinnedMemory] | None:
        """The device of these tensors and memory beside it, None if they are in host memory."""
        if self.staging is None or (device := self.staging.device_of(tensors, call)) is None:
            return None
        return device, self.staging.memory(device)

    def _empty(self, size: int, dtype: npt.DTypeLike) -> Vector:
        steps = self._steps
        self._thread.check_open()
        return steps.empty(size, dtype)

    def begin(
        self,
        call: str,
        outputs: Sequence[Tensor],
        job: Callable[[GroupSteps], object],
        opts: Any = None,
        timeout: timedelta | None = None,
        fills: bool = True,
    ) -> GroupWork:
        """Begin a collective of tensors in host memory; see `put`."""
        if fills:
            check_writable(outputs, call)

        def in_place(steps: GroupSteps) -> None:
            job(steps)

        return self.put(GroupWork(call, outputs, self.limit_s(opts, timeout)), call, in_place)

    def limit_s(self, opts: Any, timeout: timedelta | None) -> float:
        """How long a collective may take: `timeout`, that of its options, or that of the group."""
        limit = timeout if isinstance(timeout, timedelta) else getattr(opts, "timeout", None)
        return limit.total_seconds() if limit is not None and limit > timedelta(0) else self._limit_s

    def put(self, work: GroupWork, call: str, job: Callable[[GroupSteps], None]) -> GroupWork:
        """Put a collective behind those that were begun before; raises UsageError if it may not be called."""
        steps = self._steps  # those of now: a job that waits must not run in a group that is formed later
        if steps.is_alone and call in _REDUCTIONS:
            raise UsageError(
                f"rank {self.rank()} was started again and joins: it takes part in {call} only in the "
                "loops of bml.torch.resumable, which every rank must use"
            )

        def carry_out() -> int:
            with torch.inference_mode():  # tensors that were made so can be written only so
                steps.carry_out(job)
            if call != BACKWARD:
                steps.tell_losses()
            return -1

        return self._thread.begin(carry_out, work)
