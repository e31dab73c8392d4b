"""A process group of torch.distributed whose collectives are steps of bml: they survive the loss of ranks.

Every method takes the arguments that torch.distributed gives, in PyTorch's words; it checks them, and returns
a Work at once. Bad arguments raise UsageError in the caller, before anything is sent.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from bml.cluster.formation.program_end import is_failure
from bml.protocol.server.transfer import SegmentedBytes
from bml.topology.errors import UsageError
from bml.torch import movements
from bml.torch.arguments import check_fit, contiguous, inner_of, listed, operation, parts_of, root_of
from bml.torch.messages import ANY, Messages, Messenger
from bml.torch.reductions import reduction
from bml.torch.steps import GroupSteps
from bml.torch.tensors import Tensor, check, check_alike
from bml.torch.work import GroupWork, WorkThread
from bml.train.communicator import Communicator

Value = TypeVar("Value")

BACKWARD = "backward"  # the reduction of a hook that leaves no rank's part out
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", BACKWARD)

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""As torch.distributed's own for gloo."""


class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # PyTorch is untyped here
    """One rank's part in a group whose steps `communicator` carries out; rank r is its server r.

    `timeout` limits waits for collectives that a live rank does not call. `on_shutdown` is called once, with
    True if the group ends in order, when it is destroyed. `messenger` carries messages between two ranks. A
    group without a communicator is opened later.
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
    ):
        super().__init__(rank, size)  # PyTorch keeps no store of a group in Python
        self._store = store
        self._group_name = self._group_desc = "undefined"
        self._limit_s = timeout.total_seconds()
        self._thread = WorkThread(f"bml-group-{rank}")
        self._on_shutdown = on_shutdown
        self._messages = Messages(messenger, rank, self._limit_s)
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

    def _get_backend(self, device: Any) -> ProcessGroup:
        """PyTorch asks it what it supports."""
        return self

    def get_group_store(self) -> Any:
        """The store over which the group was formed."""
        return self._store

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks of the group whose parts are in the last result; at first all."""
        return self._steps.contributors

    # --- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Reduce each tensor over all ranks, in place."""
        tensors = listed(tensors)
        how = reduction(operation(opts), tensors, "all_reduce")

        def job(steps: GroupSteps) -> None:
            how.store(how.run(steps, "all_reduce", tensors), tensors)

        return self.begin("all_reduce", tensors, job, opts, timeout)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> GroupWork:
        """Reduce the tensor to the root; the tensors of others stay as they are."""
        tensors = listed(tensors)
        root = root_of(opts, self.size())
        how = reduction(more[0] if more else operation(opts), tensors, "reduce")

        def job(steps: GroupSteps) -> None:
            values = how.run(steps, f"reduce to {root}", tensors)
            if steps.rank == root:
                how.store(values, tensors)

        return self.begin("reduce", tensors, job, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Reduce a list of tensors, one a rank, and give each rank its own."""
        outputs = listed(outputs)
        inputs = inputs if inputs and isinstance(inputs[0], list | tuple) else [inputs]
        return self._reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> GroupWork:
        """Reduce a tensor of one part a rank, and give each rank its own part."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """The same for several tensors."""
        check([*outputs, *inputs], "reduce_scatter")
        parts = [parts_of(each, self.size(), "reduce_scatter", "input") for each in inputs]
        return self._reduce_scatter(list(outputs), parts, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> GroupWork:
        call, n, rank = "reduce_scatter", self.size(), self.rank()
        how = reduction(operation(opts), [*outputs, *(each for parts in inputs for each in parts)], call)
        for output, parts in zip(outputs, inputs, strict=True):
            if len(parts) != n or parts[rank].numel() != output.numel():
                raise UsageError(f"{call} needs {n} inputs, that of this rank of the size of the output")

        def job(steps: GroupSteps) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                ends = np.cumsum([0, *(each.numel() for each in parts)])
                values = how.run(steps, call, parts)
                how.store(values[ends[rank] : ends[rank + 1]], [output])

        return self.begin(call, outputs, job, opts)

    # --- movements -------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Give all ranks the tensors of the root."""
        tensors = listed(tensors)
        check(tensors, "broadcast")
        check_alike(tensors, "broadcast")
        job = movements.broadcast(tensors, root_of(opts, self.size()))
        return self.begin("broadcast", tensors, job, opts, timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Give all ranks the tensors of all, as a list."""
        inputs = listed(inputs)
        outputs = outputs if outputs and isinstance(outputs[0], list | tuple) else [outputs]
        return self._all_gather(outputs, inputs, [each for into in outputs for each in into], opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> GroupWork:
        """Give all ranks the tensors of all, one after the other in one tensor; none may be lost."""
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """The same for several tensors."""
        check([*outputs, *inputs], "all_gather")
        whole = [contiguous(each) for each in outputs]
        parts = [parts_of(each, self.size(), "all_gather", "output") for each in whole]
        return self._all_gather(parts, list(inputs), list(outputs), opts, whole)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Give all ranks several tensors of all: `outputs[r][i]` is input i of rank r."""
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self._all_gather(by_input, list(inputs), [each for row in outputs for each in row], opts)

    def _all_gather(
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        results: list[Tensor],
        opts: Any,
        whole: Sequence[Tensor] = (),
    ) -> GroupWork:
        """`whole` are contiguous tensors of which `outputs` are parts, for `results` that may not be so."""
        check([*results, *inputs], "all_gather")
        check_fit("all_gather", self.rank(), self.size(), outputs, inputs)
        gathered = movements.all_gather(outputs, inputs)

        def job(steps: GroupSteps) -> None:
            gathered(steps)
            if whole:
                steps.require_all("all_gather into one tensor")
            for result, each in zip(results, whole, strict=False):
                if each is not result:
                    result.detach().copy_(each)

        return self.begin("all_gather", results, job, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Give the root the tensors of all ranks."""
        root, into = root_of(opts, self.size()), inner_of(outputs)
        (given,) = listed(inputs)
        check([*into, given], "gather")
        if self.rank() == root and len(into) != self.size():
            raise UsageError(f"gather needs {self.size()} outputs on the root, it has {len(into)}")
        return self.begin("gather", into, movements.gather(into, given, root), opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Give each rank its one of the root's tensors."""
        root, given = root_of(opts, self.size()), inner_of(inputs)
        (output,) = listed(outputs)
        check([output, *given], "scatter")
        if self.rank() == root and len(given) != self.size():
            raise UsageError(f"scatter needs {self.size()} inputs on the root, it has {len(given)}")
        return self.begin("scatter", [output], movements.scatter(output, given, root), opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> GroupWork:
        """Give each rank its one of the tensors of every rank."""
        outputs, inputs = list(outputs), list(inputs)
        check([*outputs, *inputs], "all_to_all")
        if not len(outputs) == len(inputs) == self.size():
            raise UsageError(
                f"all_to_all needs {self.size()} inputs and outputs, it has {len(inputs)} and {len(outputs)}"
            )
        return self.begin("all_to_all", outputs, movements.all_to_all(outputs, inputs), opts)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> GroupWork:
        """Give each rank its part of the tensor of every rank; sizes are along the first dimension."""
        check([output, given], "all_to_all_single")
        whole = contiguous(output)
        into = parts_of(whole, self.size(), "all_to_all_single", "output", output_sizes)
        parts = parts_of(given, self.size(), "all_to_all_single", "input", input_sizes)
        even = not output_sizes and not input_sizes
        moved = movements.all_to_all(into, parts, even)

        def job(steps: GroupSteps) -> None:
            moved(steps)
            if whole is not output:
                output.detach().copy_(whole)

        return self.begin("all_to_all_single", [output], job, opts)

    alltoall_base = all_to_all_single

    # --- messages between two ranks ----------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> GroupWork:
        """Send a tensor to one rank; messages pass collectives by."""
        return self._messages.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> GroupWork:
        """Receive a tensor of the same size from one rank, in the order in which it was sent."""
        return self._messages.recv(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> GroupWork:
        """The same from any rank; the work's `source_rank` says from which."""
        return self.recv(tensors, ANY, tag)

    # --- the barrier -----------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Wait for all live ranks."""
        nothing = np.empty(0, np.uint8)

        def job(steps: GroupSteps) -> None:
            steps.step("barrier", "max", lambda contributors: nothing)

        return self.begin("barrier", [], job, opts, timeout)

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
        ended = self._thread.close(self._limit_s if in_order else 0)
        if on_shutdown is not None:
            on_shutdown(in_order and ended)
        self._messages.close()

    # --- small parts -----------------------------------------------------------------------------

    def begin(
        self,
        call: str,
        outputs: Sequence[Tensor],
        job: movements.Job,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Put a collective behind those that were begun before; raises UsageError if it may not be called."""
        steps = self._steps  # those of now: a job that waits must not run in a group that is formed later
        if steps.is_alone and call in _REDUCTIONS:
            raise UsageError(
                f"rank {self.rank()} was started again and joins: it takes part in {call} only in the "
                "loops of bml.torch.resumable, which every rank must use"
            )
        limit = timeout if isinstance(timeout, timedelta) else getattr(opts, "timeout", None)
        limit_s = limit.total_seconds() if limit is not None and limit > timedelta(0) else self._limit_s

        def carry_out() -> int:
            with torch.inference_mode():  # tensors that were made so can be written only so
                job(steps)
            if call != BACKWARD:
                steps.tell_losses()
            return -1

        return self._thread.begin(carry_out, GroupWork(call, outputs, limit_s))
