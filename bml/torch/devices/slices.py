"""Cuts a large all-reduce into slices, so that copies run while other slices are on the wires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from bml.torch.devices.device import Mark
from bml.torch.reductions import Reduction
from bml.torch.steps import GroupSteps
from bml.torch.tensors import Tensor

_BASE_NBYTES = 3 << 20
"""The bytes that a bus copies both ways in the time that one more step costs.

With k slices only the first copy out and the last copy in are not hidden. For P bytes, a bus of C bytes/s and
h seconds for one more step that is 2 P / (k C) + k h, least at k = sqrt(P / (C h / 2)). With 12 GB/s (PCIe 3,
the slowest that GPUs have) and 0.5 ms, C h / 2 is 3 MB.
"""


def n_slices(nbytes: int) -> int:
    """Into how many slices a tensor is cut; the same on all ranks, as it follows from the size alone."""
    return max(1, isqrt(nbytes // _BASE_NBYTES))


def cut(flat: Tensor, n: int) -> list[Tensor]:
    """Views of a tensor of shape (m,): n parts, one after the other, whose lengths differ by one at most."""
    ends = [flat.numel() * each // n for each in range(n + 1)]
    return [flat[start:end] for start, end in pairwise(ends)]


@dataclass
class SlicedAllReduce:
    """One all-reduce in several steps: slice i of `given` is reduced to slice i of `results`.

    `given` stays as it is to the end: if a rank is lost between two slices, those that have its part are
    reduced again, until all slices have the same contributors. As contributors are agreed upon in every
    step, all ranks repeat the same ones. `brought` are the marks after which slices of `given` may be read.
    Results are copied to `targets` on the device as they come; without targets they stay where they are.
    """

    how: Reduction
    whole: str
    """Dtype and shape of the tensor, which are alike on all ranks."""
    brought: Sequence[Mark]
    given: Sequence[Tensor]
    results: Sequence[Tensor]
    targets: Sequence[Tensor]
    copy_in: Callable[[Tensor, Tensor], Mark]

    def run(self, steps: GroupSteps) -> None:
        """Carry it out."""
        n = len(self.given)
        contributors = dict[int, tuple[int, ...]]()
        came = dict[int, Mark]()
        stale = list(range(n))
        while stale:
            for number in stale:
                self.brought[number].wait()
                if number in came:
                    came[number].wait()  # the result that is replaced is still copied from there
                self._reduce(steps, number)
                if self.targets:
                    came[number] = self.copy_in(self.results[number], self.targets[number])
                contributors[number] = steps.contributors
            stale = [number for number in range(n) if contributors[number] != steps.contributors]

    def _reduce(self, steps: GroupSteps, number: int) -> None:
        of = f"{number + 1} of {len(self.given)} of {self.whole} on an accelerator"
        call = f"all_reduce of slice {of}:"
        values = self.how.run(steps, call, [self.given[number]])
        self.how.store(values, [self.results[number]])
