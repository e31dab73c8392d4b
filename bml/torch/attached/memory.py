"""Tensors as numpy arrays that a session can name, and the parameters that cannot be trained here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError
from bml.torch.devices.registry import device_at
from bml.train.state import Mirror

_SAME_SIZE = {1: torch.int8, 2: torch.int16}
"""Integers in whose place numpy sees dtypes that it has not, such as bfloat16."""
_REDUCED = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""The dtypes of parameters that can be trained, and those in which their gradients are summed."""


class Named(NamedTuple):
    """A parameter and its name in the model."""

    name: str
    parameter: torch.nn.Parameter


class TensorMirror(Mirror):
    """The values of a dense tensor on an accelerator, in host memory. Raises UsageError if numpy has no such.

    A copy to or from host memory that is not page-locked waits for all that the current stream was given.
    """

    def __init__(self, tensor: torch.Tensor, name: str):
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._array = _array_over(self._host, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """See Mirror."""
        return self._array

    def read(self) -> None:
        """See Mirror."""
        with torch._C.DisableTorchFunctionSubclass():
            self._host.copy_(self._tensor.detach())

    def write(self) -> None:
        """See Mirror."""
        with torch._C.DisableTorchFunctionSubclass():
            self._tensor.detach().copy_(self._host)


def array_of(tensor: torch.Tensor, name: str) -> Array | TensorMirror:
    """Return an array over the memory of a tensor, or the mirror of one on an accelerator.

    Raises UsageError if numpy cannot see its values.
    """
    if tensor.device.type in ("cpu", "meta") or tensor.layout != torch.strided or tensor.is_quantized:
        return _array_over(tensor, name)
    return TensorMirror(tensor, name)


def bits_of(tensor: torch.Tensor) -> Array:
    """An array over the memory of a dense tensor on the CPU, of integers for dtypes that numpy has not."""
    return _array_over(tensor, "the tensor")


def _array_over(tensor: torch.Tensor, name: str) -> Array:
    plain = tensor.detach()
    try:
        try:
            array: Array = plain.numpy()
        except TypeError:  # a dtype that numpy has not
            array = plain.view(_SAME_SIZE[tensor.element_size()]).numpy()
    except (TypeError, RuntimeError, KeyError, NotImplementedError):
        raise UsageError(
            f"{name} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}: only dense tensors "
            "with values can be given to servers that join"
        ) from None
    return array


def is_of_numpy(dtype: torch.dtype) -> bool:
    """Whether numpy has this dtype; tensors of others are seen as integers."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def reduced_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of parameters of this dtype are summed."""
    return _REDUCED[dtype]


def check_trainable(named: Named) -> None:
    """Raise UsageError for a parameter whose gradients cannot be reduced."""
    parameter = named.parameter
    try:
        device_at(parameter.device)
    except UsageError:
        raise UsageError(
            f"the parameter {named.name!r} is on the device {parameter.device}: attach trains on the CPU or "
            "on a GPU of CUDA; call model.to(device) before the optimizer is made"
        ) from None
    if parameter.layout != torch.strided:
        raise UsageError(f"the parameter {named.name!r} is {parameter.layout}: make it dense")
    if parameter.dtype not in _REDUCED:
        names = ", ".join(str(each).removeprefix("torch.") for each in _REDUCED)
        raise UsageError(
            f"the parameter {named.name!r} is {str(parameter.dtype).removeprefix('torch.')}: gradients can "
            f"be {names}; keep it in one of these, or freeze it with requires_grad_(False)"
        )


def trained(model: Any, optimizer: Any) -> list[Named]:
    """Return the parameters that the optimizer changes, each once, in the order in which the model has them.

    Those that the model does not have come last, under the names of their places in the optimizer. Raises
    UsageError for parameters that cannot be trained here, for those that require a gradient and that the
    optimizer does not have, and if there is none.
    """
    wanted = {
        id(parameter): Named(f"param_groups[{number}][{place}]", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter.requires_grad
    }
    require = [Named(*each) for each in model.named_parameters() if each[1].requires_grad]
    of_the_model = [each for each in require if id(each.parameter) in wanted]
    known = {id(each.parameter) for each in of_the_model}
    chosen = [*of_the_model, *(named for key, named in wanted.items() if key not in known)]
    if not chosen:
        raise UsageError("the optimizer has no parameter that requires a gradient: there is nothing to train")
    for named in chosen:
        check_trainable(named)
        if named.parameter.device != chosen[0].parameter.device:
            raise UsageError(
                f"the parameter {named.name!r} is on {named.parameter.device}, and {chosen[0].name!r} on "
                f"{chosen[0].parameter.device}: attach trains a model on one device; move all of it there "
                "(model.to(device)) before the optimizer is made"
            )
    for named in require:
        if id(named.parameter) not in wanted:
            raise UsageError(
                f"the parameter {named.name!r} requires a gradient, and the optimizer does not have it: its "
                "gradient would differ between servers; freeze it with requires_grad_(False), or give it to "
                "the optimizer"
            )
    return chosen
