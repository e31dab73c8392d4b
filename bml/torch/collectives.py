"""The collectives of a process group: each checks its arguments and makes a job, which `begin` carries out.

Every method takes the arguments that torch.distributed gives, in PyTorch's words, and returns a Work at once.
Bad arguments raise UsageError in the caller, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from bml.topology.errors import UsageError
from bml.torch import movements
from bml.torch.arguments import (
    check_fit,
    contiguous,
    inner_of,
    is_of_objects,
    listed,
    operation,
    parts_of,
    root_of,
)
from bml.torch.reductions import Reduction, reduction
from bml.torch.steps import GroupSteps
from bml.torch.tensors import Tensor, check, check_alike
from bml.torch.uneven import Count, Counts, counter_of
from bml.torch.work import GroupWork


class Collectives:
    """The collectives of one rank, of tensors in host memory."""

    if TYPE_CHECKING:

        @property
        def counts(self) -> Counts:
            """How many ranks have a batch, in PyTorch's Join."""
            raise NotImplementedError

        def rank(self) -> int:
            """This rank."""
            raise NotImplementedError

        def size(self) -> int:
            """How many ranks the group has."""
            raise NotImplementedError

        def begin(
            self,
            call: str,
            outputs: Sequence[Tensor],
            job: movements.Job,
            opts: Any = None,
            timeout: timedelta | None = None,
            fills: bool = True,
        ) -> GroupWork:
            """Begin a collective that gives `outputs` their values, if its job returns True.

            With `fills` False it will not. Raises UsageError for an output that cannot be written.
            """
            raise NotImplementedError

    # --- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Reduce each tensor over all ranks, in place."""
        tensors = listed(tensors)
        how = self.all_reduction(tensors, opts)
        if (counter := counter_of(tensors, opts)) is not None:
            count = Count(how, tensors[0])
            work = self.begin("all_reduce", tensors, count.run, opts, timeout)
            return self.counts.hold(counter, count, work)

        def job(steps: GroupSteps) -> bool:
            how.store(how.run(steps, "all_reduce", tensors), tensors)
            return True

        return self.begin("all_reduce", tensors, job, opts, timeout)

    def all_reduction(self, tensors: Sequence[Tensor], opts: Any) -> Reduction:
        """How `allreduce` reduces these tensors; raises UsageError if they cannot be."""
        return reduction(operation(opts), tensors, "all_reduce")._replace(divisor=self.counts.divisor())

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> GroupWork:
        """Reduce the tensor to the root; the tensors of others stay as they are."""
        tensors = listed(tensors)
        root = root_of(opts, self.size())
        how = reduction(more[0] if more else operation(opts), tensors, "reduce")

        def job(steps: GroupSteps) -> bool:
            values = how.run(steps, f"reduce to {root}", tensors)
            if steps.rank == root:
                how.store(values, tensors)
            return steps.rank == root

        return self.begin("reduce", tensors, job, opts, fills=self.rank() == root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Reduce a list of tensors, one a rank, and give each rank its own."""
        outputs = listed(outputs)
        inputs = inputs if inputs and isinstance(inputs[0], list | tuple) else [inputs]
        return self._reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> GroupWork:
        """Reduce a tensor of one part a rank, and give each rank its own part."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """The same for several tensors."""
        check([*outputs, *inputs], "reduce_scatter")
        parts = [parts_of(each, self.size(), "reduce_scatter", "input") for each in inputs]
        return self._reduce_scatter(list(outputs), parts, opts)

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> GroupWork:
        call, n, rank = "reduce_scatter", self.size(), self.rank()
        how = reduction(operation(opts), [*outputs, *(each for parts in inputs for each in parts)], call)
        for output, parts in zip(outputs, inputs, strict=True):
            if len(parts) != n or parts[rank].numel() != output.numel():
                raise UsageError(f"{call} needs {n} inputs, that of this rank of the size of the output")

        def job(steps: GroupSteps) -> bool:
            for output, parts in zip(outputs, inputs, strict=True):
                ends = np.cumsum([0, *(each.numel() for each in parts)])
                values = how.run(steps, call, parts)
                how.store(values[ends[rank] : ends[rank + 1]], [output])
            return True

        return self.begin(call, outputs, job, opts)

    # --- movements -------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Give all ranks the tensors of the root; of a lost one those of another, unless they are objects."""
        tensors = listed(tensors)
        check(tensors, "broadcast")
        check_alike(tensors, "broadcast")
        root = root_of(opts, self.size())
        job = movements.broadcast(tensors, root, may_stand_in=not is_of_objects())
        return self.begin("broadcast", tensors, job, opts, timeout, fills=self.rank() != root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Give all ranks the tensors of all, as a list."""
        inputs = listed(inputs)
        outputs = outputs if outputs and isinstance(outputs[0], list | tuple) else [outputs]
        return self._all_gather(outputs, inputs, [each for into in outputs for each in into], opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> GroupWork:
        """Give all ranks the tensors of all, one after the other in one tensor; none may be lost."""
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """The same for several tensors."""
        check([*outputs, *inputs], "all_gather")
        whole = [contiguous(each) for each in outputs]
        parts = [parts_of(each, self.size(), "all_gather", "output") for each in whole]
        return self._all_gather(parts, list(inputs), list(outputs), opts, whole)

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

        def job(steps: GroupSteps) -> bool:
            gathered(steps)
            if whole:
                steps.require_all("all_gather into one tensor")
            for result, each in zip(results, whole, strict=False):
                if each is not result:
                    result.detach().copy_(each)
            return True

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

        def job(steps: GroupSteps) -> bool:
            moved(steps)
            if whole is not output:
                output.detach().copy_(whole)
            return True

        return self.begin("all_to_all_single", [output], job, opts)

    # --- the barrier -----------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Wait for all live ranks."""
        nothing = np.empty(0, np.uint8)

        def job(steps: GroupSteps) -> bool:
            steps.step("barrier", "max", lambda contributors: nothing)
            return True

        return self.begin("barrier", [], job, opts, timeout)
