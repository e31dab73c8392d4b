"""Reductions of tensors: which dtype is summed how, and what becomes of sums when ranks are lost.

Sums of floating dtypes are multiplied by ranks / contributors, so that they keep their size, and counts stay
integers; AVG is the mean
over the contributors, of integers rounded to zero as NCCL's is. float16 and bfloat16 are reduced in float32,
and rounded once. bool is reduced as NCCL does it: SUM, MAX and BOR are "or", PRODUCT, MIN and BAND are "and".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from bml.topology.errors import UsageError
from bml.torch.steps import GroupSteps, Vector
from bml.torch.tensors import Tensor, check, check_alike, describe, flat, raw, write
from bml.train.operations.places import Places

_OPS = {"SUM": "sum", "AVG": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
_BITWISE: dict[str, Callable[[Any, Any], Any]] = {
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_OF_BOOL = {"SUM": "max", "MAX": "max", "BOR": "max", "PRODUCT": "min", "MIN": "min", "BAND": "min"}

_WIDENED = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


class Reduction(NamedTuple):
    """How tensors of one dtype are reduced. `op` is the step's; empty: the ranks' values are gathered.

    `divisor` are the ranks by whose number the ranks have divided what they contribute; None: all ranks.
    """

    name: str
    op: str
    dtype: Any
    divisor: tuple[int, ...] | None = None

    def run(self, steps: GroupSteps, call: str, tensors: Sequence[Tensor]) -> Vector:
        """Reduce all of the tensors in one step; the result is flat, and of the dtype of `_array`."""
        text = f"{call} {self.name} {describe(tensors)}"
        if not self.op:
            return self._bitwise(steps, text, tensors)
        vector = self.vector(steps, tensors)
        own = self.dtype in _WIDENED  # torch wraps only arrays that may be written
        done = steps.step(text, self.op, lambda contributors: vector, shared=not own)
        return self._scaled(done.result, steps.n_ranks, done.contributors)

    def store(self, values: Vector, tensors: Sequence[Tensor]) -> None:
        """Give the elements of a result to the tensors, in order."""
        at = 0
        for each in tensors:
            part = values[at : at + each.numel()]
            at += each.numel()
            if self.dtype in _WIDENED:
                each.detach().copy_(torch.from_numpy(part).view(each.shape))
            else:
                write(each, part)

    def vector(self, steps: GroupSteps, tensors: Sequence[Tensor]) -> Vector:
        """What a rank contributes: all elements in the dtype in which they are reduced, often not copied."""
        arrays = [self._array(each) for each in tensors]
        if len(arrays) == 1:
            return arrays[0]
        vector = steps.empty(sum(each.size for each in arrays), arrays[0].dtype)
        return np.concatenate(arrays, out=vector)

    def _array(self, tensor: Tensor) -> Vector:
        if self.dtype is torch.bool:
            return raw(tensor)
        found: Vector = (flat(tensor).float() if self.dtype in _WIDENED else flat(tensor)).numpy()
        return found

    def _scaled(self, total: Vector, n_ranks: int, contributors: tuple[int, ...]) -> Vector:
        inexact = np.issubdtype(total.dtype, np.inexact)
        if self.name == "AVG" and not inexact:
            return _divided(total, len(contributors))
        ranks = range(n_ranks) if self.divisor is None else self.divisor
        if self.name == "AVG":
            times, by = 1, len(contributors)
        elif self.name == "SUM" and inexact:
            times, by = len(ranks), len(set(ranks) & set(contributors))
        else:
            return total
        if times == by or not by:  # without one of them nobody uses the result
            return total
        with np.errstate(all="ignore"):  # an overflow is a result, also if the user has numpy raise
            # Both one after the other: 11 times 13/11 is not 13.
            scaled: Vector = np.multiply(total, total.dtype.type(times)) if times > 1 else total
            return np.divide(scaled, total.dtype.type(by), out=scaled if times > 1 else None)

    def _bitwise(self, steps: GroupSteps, text: str, tensors: Sequence[Tensor]) -> Vector:
        mine = np.concatenate([self._array(each) for each in tensors])
        places = Places([mine.nbytes] * steps.n_ranks)
        parts = [mine.view(np.uint8)]
        done = steps.step(text, "sum", lambda contributors: places.vector(steps.rank, parts, steps.empty))
        total: npt.NDArray[Any] = done.result
        found = [places.part(total, rank).view(mine.dtype) for rank in done.contributors]
        combined: Vector = reduce(_BITWISE[self.name], found)
        return combined


def _divided(total: npt.NDArray[Any], n: int) -> Vector:
    """The quotients of integers, rounded to zero as NCCL's are (and C's)."""
    wide = total if total.dtype.itemsize == 8 else total.astype(np.int64)  # n may be too large for 8 bits
    quotient: Vector = (wide // n + ((wide < 0) & (wide % n != 0))).astype(total.dtype)
    return quotient


def reduction(op: Any, tensors: Sequence[Tensor], call: str) -> Reduction:
    """Choose how to reduce these tensors with torch's `op`. Raises UsageError if they cannot be."""
    check(tensors, call)
    check_alike(tensors, call)
    dtype, name = tensors[0].dtype, _name(op)
    if dtype is torch.bool and name in _OF_BOOL:
        return Reduction(name, _OF_BOOL[name], dtype)
    if name in _BITWISE:
        if dtype not in _INTEGERS:
            raise UsageError(f"{call} with {name} takes integers and bool, not {dtype}")
        return Reduction(name, "", dtype)
    if name not in _OPS:
        raise UsageError(f"{call} with {name or op}: the backend bml offers {', '.join([*_OPS, *_BITWISE])}")
    if dtype not in (*_FLOATS, *_WIDENED, *_COMPLEX, *_INTEGERS):
        raise UsageError(
            f"{call} cannot reduce {dtype}: convert the tensor, for example with tensor.to(torch.bfloat16)"
        )
    if name in ("MIN", "MAX") and dtype in _COMPLEX:
        raise UsageError(f"{call} with {name}: complex numbers have no order")
    return Reduction(name, _OPS[name], dtype)


def _name(op: Any) -> str:
    """The name of torch's ReduceOp; empty for one that is not known here."""
    known = [*_OPS, *_BITWISE]
    return next((each for each in known if op == getattr(dist.ReduceOp, each)), "")
