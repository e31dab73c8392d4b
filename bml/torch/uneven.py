"""Ranks with different numbers of batches, in PyTorch's Join: how many of them have one.

Before each forward pass a rank with a batch adds a one, and the others a zero. Unless told to divide by the
number of ranks at first, the reducer of DDP waits for this sum in the backward pass, truncates it to an
integer, and divides by it what this rank contributes to its gradients. So the sum must be exact, also when
ranks are lost, and these gradients are means over the ranks that were counted and are left.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch.distributed.algorithms.join import Join

from bml.torch.arguments import frame_of, is_of_all_reduce
from bml.torch.reductions import Reduction
from bml.torch.steps import GroupSteps, Vector
from bml.torch.tensors import Tensor
from bml.torch.work import GroupWork, this_backward

_BEFORE_FORWARD = inspect.unwrap(Join.notify_join_context).__code__
_WITHOUT_BATCHES = inspect.unwrap(Join._get_num_nonjoined_procs).__code__


class Count:
    """The sum of one tensor of every rank; `ranks` are those whose tensor is not zero, once it is known."""

    def __init__(self, how: Reduction, tensor: Tensor):
        self.ranks: tuple[int, ...] = ()
        self.work: GroupWork | None = None
        self._how, self._tensor = how, tensor

    def run(self, steps: GroupSteps) -> bool:
        """Carry it out: each rank has a place of its own."""
        (own,) = self._how.vector(steps, [self._tensor])

        def placed(contributors: tuple[int, ...]) -> Vector:
            places = np.zeros(steps.n_ranks, own.dtype)
            places[steps.rank] = own
            return places

        found = steps.step("all_reduce of ranks that have a batch", "sum", placed).result
        self.ranks = tuple(np.flatnonzero(found).tolist())
        self._how.store(found.sum(keepdims=True), [self._tensor])
        return True


class Counts:
    """The last count for each model, held as long as that: its reducer keeps the C++ half of a work alone."""

    def __init__(self) -> None:
        self._of = WeakKeyDictionary[Any, Count]()

    def hold(self, counter: Any, count: Count, work: GroupWork) -> GroupWork:
        """Hold the count that `counter` asked for, and its work."""
        count.work, self._of[counter] = work, count
        return work

    def divisor(self) -> tuple[int, ...] | None:
        """The ranks by whose number the caller's gradients are divided; None: by that of all ranks.

        A reducer waits for its count in each backward pass. What calls all_reduce there is another one.
        """
        this = this_backward()
        for count in self._of.values():
            if count.work is not None and count.work.waiting_backward == this >= 0 and not is_of_all_reduce():
                return count.ranks
        return None


def counter_of(tensors: Sequence[Tensor], opts: Any) -> Any:
    """The model or the Join for which the caller counts ranks that have a batch; None if it does not."""
    if len(tensors) != 1 or tensors[0].numel() != 1:
        return None
    frame = frame_of(_BEFORE_FORWARD, _WITHOUT_BATCHES)
    if frame is None:
        return None
    if frame.f_code is _WITHOUT_BATCHES:
        return frame.f_locals["self"]
    # The other sum there is about the end, and nobody but Join waits for it.
    return frame.f_locals["joinable"] if getattr(opts, "asyncOp", True) else None
