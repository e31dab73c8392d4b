"""Tensors as the collectives see them: whether they can be sent, their memory, and results that come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bml.io.copies import copy
from bml.topology.errors import UsageError
from bml.train.operations.places import Raw

Tensor = Any
"""A torch.Tensor; PyTorch is untyped for the type checker here."""


def is_tensor(found: Any) -> bool:
    """Whether it is a tensor of PyTorch."""
    return isinstance(found, torch.Tensor)


def check(tensors: Sequence[Tensor], call: str) -> None:
    """Raise UsageError unless all are dense tensors in host memory."""
    check_dense(tensors, call)
    devices = sorted({str(each.device) for each in tensors})
    if len(devices) > 1:
        raise UsageError(
            f"{call} was given tensors on different devices ({', '.join(devices)}): move them to one"
        )
    if devices and devices != ["cpu"]:
        raise UsageError(
            f"{call} was given a tensor on {devices[0]}: the backend bml takes tensors in host memory, and "
            "on GPUs where torch.cuda is available; give tensor.cpu()"
        )


def check_dense(tensors: Sequence[Tensor], call: str) -> None:
    """Raise UsageError unless all are dense tensors with elements."""
    for each in tensors:
        if not isinstance(each, torch.Tensor):
            raise UsageError(f"{call} takes tensors, it was given a {type(each).__name__}")
        if each.layout != torch.strided:
            raise UsageError(
                f"{call} was given a sparse tensor ({each.layout}): give tensor.to_dense(), and make "
                "embeddings without sparse=True"
            )
        if each.is_quantized:
            raise UsageError(f"{call} was given a quantized tensor: give tensor.dequantize()")
        if each.is_meta:
            raise UsageError(
                f"{call} was given a tensor on meta, which has no elements: call "
                'model.to_empty(device="cpu") and set its parameters before'
            )


def check_writable(tensors: Sequence[Tensor], call: str) -> None:
    """Raise UsageError unless all can take a result: each element has memory of its own."""
    for each in tensors:
        if any(size > 1 and stride == 0 for size, stride in zip(each.shape, each.stride(), strict=True)):
            raise UsageError(
                f"{call} was given an expanded tensor, whose elements share memory, to write into: give "
                "tensor.contiguous()"
            )


def check_alike(tensors: Sequence[Tensor], call: str) -> None:
    """Raise UsageError unless they are at least one, and of one dtype."""
    if not tensors:
        raise UsageError(f"{call} needs at least one tensor")
    dtypes = sorted({str(each.dtype) for each in tensors})
    if len(dtypes) > 1:
        raise UsageError(
            f"{call} was given tensors of different dtypes ({', '.join(dtypes)}): convert them to one"
        )


def describe(tensors: Sequence[Tensor]) -> str:
    """Dtype and shapes in words; ranks whose words differ get StepMismatch."""
    shapes = " ".join(str(list(each.shape)) for each in tensors)
    return f"{str(tensors[0].dtype).removeprefix('torch.')} {shapes}"


def flat(tensor: Tensor) -> Tensor:
    """Its elements in order, as a contiguous tensor of shape (n,): over its own memory where that is so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def norm(tensor: Tensor) -> float:
    """The Euclidean norm of its elements."""
    return float(torch.linalg.vector_norm(tensor))


def raw(tensor: Tensor) -> Raw:
    """Its elements as bytes, shape (nbytes,): over its own memory where that is contiguous."""
    found: Raw = flat(tensor).view(torch.uint8).numpy()
    return found


def write(tensor: Tensor, values: npt.NDArray[np.generic]) -> None:
    """Set its elements, in order, to the bits of `values`, a contiguous array of as many bytes."""
    target = tensor.detach()
    own = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    fresh = target if own else torch.empty(target.shape, dtype=target.dtype)
    copy(raw(fresh), values.view(np.uint8))
    if not own:
        target.copy_(fresh)
