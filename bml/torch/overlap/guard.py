"""Parameters whose new values are not there yet: the first use of one, by whatever reads it, waits for them.

Hooks of modules wait before their own parameters are used. They miss a parameter that another module or a
function uses, such as the output projection of nn.MultiheadAttention, a moving average or a print. So until
its values come, a parameter has a class of its own, by which PyTorch tells of its use. That alone would miss
functions of C++ that are given tensors without PyTorch's knowledge, such as extensions.

Parameters that are not trained have no new values to come. They are guarded against changes alone: samples
that are computed again for the batch before must see them as they were.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bml.topology.errors import UsageError

OnUse = Callable[[], None]

_METADATA = (
    *(
        "requires_grad",
        "is_leaf",
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_cuda",
        "is_sparse",
    ),
    *("is_quantized", "is_meta", "grad_fn", "_backward_hooks"),
)
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("grad", *_METADATA)),
    *(Tensor.grad.__set__, Tensor.grad.__delete__),
    *(Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.ndimension),
    *(Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.__len__),
}
"""What reads or changes no value of a parameter.

`requires_grad` may not be changed before: samples that are computed again for a step must see it as it was.
"""
_ALIASES = {
    *(Tensor.data.__get__, Tensor.data.__set__, Tensor.detach, Tensor.numpy, Tensor.__array__),
    *(Tensor.untyped_storage, Tensor.data_ptr, Tensor.__setitem__),
}
"""What changes a parameter, or makes something that may change it without its knowledge."""


class Behind:
    """What a parameter is, besides, while its new values are to come. Its first use calls `on_use`.

    With `is_current` only what may change it does.
    """

    on_use: OnUse
    is_current: bool

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function not in _HARMLESS:
            may_change = _may_change(function, given)
            for each in _behind((args, given)):
                if may_change or not each.is_current:
                    each.on_use()
        if any(True for _ in _behind((args, given))):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **given)
        return function(*args, **given)

    def detach(self) -> Any:
        """See Tensor. For nn.Parameter(parameter) it is a parameter, which that demands of a class."""
        self.on_use()
        found = torch.detach(self)
        if sys._getframe(1).f_code is not nn.Parameter.__new__.__code__:
            return found
        return Tensor._make_subclass(type(self), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.on_use()
        with _unguarded(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.on_use()
        with _unguarded(self):
            return self.__reduce_ex__(protocol)


class BeforeForward:
    """A forward hook of a module. A copy of the module has one that does nothing."""

    def __init__(self, wait: OnUse):
        self._wait = wait

    def __call__(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """See torch.nn.Module.register_forward_pre_hook. Raises UsageError in what is compiled."""
        if self._wait is _nothing:
            return
        if torch.compiler.is_compiling():
            _refuse_compiled()
        self._wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> BeforeForward:
        return BeforeForward(_nothing)

    def __reduce__(self) -> Any:
        return BeforeForward, (_nothing,)


def _nothing() -> None:
    pass


def _refuse_compiled() -> None:
    raise UsageError(
        "overlap_forward cannot be used with torch.compile: what is compiled reads parameters where that "
        "cannot be noticed; leave overlap_forward out"
    )


# By this mark the compiler leaves the function, and its error, to Python.
_refuse_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]


def guard(parameter: Tensor, on_use: OnUse, is_current: bool = False) -> None:
    """Let the first use of a parameter call `on_use`, which must `release` it or raise an error.

    With `is_current` its values are there, and only what may change them counts.
    """
    own: Any = type(parameter)
    parameter.__class__ = _behind_class(own)
    parameter.on_use, parameter.is_current = on_use, is_current


def release(parameter: Tensor) -> None:
    """Undo `guard`; no effect on other parameters."""
    if isinstance(parameter, Behind):
        parameter.__class__ = type(parameter).__bases__[1]
        del parameter.on_use, parameter.is_current


@contextmanager
def _unguarded(parameter: Any) -> Iterator[None]:
    """Let a parameter be of its own class. It may still be behind, where lost samples are computed again."""
    if not isinstance(parameter, Behind):
        yield
        return
    on_use, is_current = parameter.on_use, parameter.is_current
    release(parameter)
    try:
        yield
    finally:
        guard(parameter, on_use, is_current)


def _may_change(function: Any, given: Mapping[str, Any]) -> bool:
    """Whether a function may change a parameter that it is given, now or by what it returns."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or "out" in given or function in _ALIASES


@cache
def _behind_class(own: Any) -> Any:
    return type(f"Behind{own.__name__}", (Behind, own), {"__module__": __name__})


def _behind(value: Any) -> Iterator[Behind]:
    """Parameters in the arguments of a function that are behind when the iterator comes to them."""
    if isinstance(value, Behind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _behind(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _behind(each)
