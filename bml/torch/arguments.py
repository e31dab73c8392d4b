"""Reads the arguments of torch.distributed's calls, in the forms in which PyTorch and users give them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from bml.topology.errors import UsageError
from bml.torch.tensors import Tensor


def listed(tensors: Any) -> list[Tensor]:
    """A tensor, or a list of tensors, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def inner_of(lists: Any) -> list[Tensor]:
    """The tensors of a list that torch.distributed wraps into another, or leaves empty."""
    return [each for inner in lists for each in listed(inner)]


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or uninitialised contiguous memory like it, from which it is to be filled."""
    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)


def operation(opts: Any) -> Any:
    """The operation of the options, or `opts` itself if it is one; SUM by default."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


_BROADCASTS_OBJECTS = inspect.unwrap(dist.broadcast_object_list).__code__
_ALL_REDUCES = inspect.unwrap(dist.all_reduce).__code__


def is_of_objects() -> bool:
    """Whether the caller broadcasts objects: then the tensors of all ranks but the root hold no values."""
    return frame_of(_BROADCASTS_OBJECTS) is not None


def is_of_all_reduce() -> bool:
    """Whether the caller is torch.distributed.all_reduce, and not the reducer of DDP, which is in C++."""
    return frame_of(_ALL_REDUCES) is not None


def frame_of(*codes: CodeType) -> FrameType | None:
    """The innermost of the callers' frames that runs one of these functions, None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def root_of(opts: Any, size: int) -> int:
    """The root of the options, or `opts` itself if it is a rank; raises UsageError if there is none."""
    root = int(getattr(opts, "rootRank", opts if isinstance(opts, int) else 0))
    if not 0 <= root < size:
        raise UsageError(f"the root is rank {root}, the group has ranks 0 .. {size - 1}")
    return root


def check_fit(call: str, rank: int, size: int, outputs: list[list[Tensor]], inputs: list[Tensor]) -> None:
    """Raise UsageError unless each input has an output for every rank, of its size for this one."""
    if len(outputs) != len(inputs) or any(len(into) != size for into in outputs):
        raise UsageError(f"{call} needs {size} outputs for each input")
    for into, given in zip(outputs, inputs, strict=True):
        if into[rank].nbytes != given.nbytes:
            raise UsageError(
                f"{call}: the output for this rank has {into[rank].nbytes} bytes, its input {given.nbytes}"
            )


def parts_of(whole: Tensor, n: int, call: str, what: str, sizes: Sequence[int] = ()) -> list[Tensor]:
    """The parts of a tensor for the ranks, along its first dimension, even unless sizes are given."""
    if sizes:
        n_rows = whole.shape[0] if whole.dim() else 0
        if len(sizes) != n or sum(sizes) != n_rows or min(sizes) < 0:
            raise UsageError(
                f"{call}: {what} split sizes {list(sizes)} are not {n} that sum up to {n_rows} rows"
            )
        return list(torch.split(whole, list(sizes)))
    if whole.numel() % n:
        raise UsageError(f"{call}: {what} has {whole.numel()} elements, no multiple of the {n} ranks")
    return list(whole.detach().reshape(n, -1).unbind())
