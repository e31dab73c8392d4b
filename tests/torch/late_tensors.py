"""Tensors of a fake device under torch itself: `torch.device("late")`, with autograd's own threads.

`install` makes the device known to torch. Whatever is computed with its tensors is given to a stream of a
`FakeDevice`, and carried out late. Their memory cannot be read by anything that takes host memory: numpy and
pointers refuse it, and copies to the host wait as those of an accelerator do. It must be installed before
the first backward pass of a process, and the process must not fork after that: autograd has a thread for each
device. An exception in a hook in that thread ends the process: torch's device guards in Python cannot unwind.
"""

from __future__ import annotations

from typing import Any

import torch
from fake_device import FakeDevice, poison
from torch.utils._pytree import tree_map

WHERE_NAME = "late"
_AT_ONCE = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
"""What depends on the values: the host waits for them."""


class LateDevice(FakeDevice):
    """A fake device whose tensors are those of torch.device("late")."""

    def holds(self, tensor: Any) -> bool:
        return True

    def copy_out(self, source: Any, into: torch.Tensor, after: Any) -> Any:
        assert type(into) is torch.Tensor
        return super().copy_out(source.values, into, after)

    def copy_in(self, source: torch.Tensor, into: Any, after: Any) -> Any:
        assert type(source) is torch.Tensor
        return super().copy_in(source, into.values, after)

    def drain(self) -> None:
        """Wait, as the host does, for all that the current stream was given."""
        with self._lock:
            self.run_until(self._current.mark(self))


class LateModule:
    """What torch asks of the module of a device: `torch.late`. Its random numbers are its own."""

    def __init__(self) -> None:
        self.device_of_tests = LateDevice(0)
        self.random = torch.Generator().manual_seed(0).get_state()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed).get_state()

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any) -> torch.Tensor:
        return self.random.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any) -> None:
        self.random = state.clone()

    class device:  # noqa: N801  # as in torch.cuda
        def __init__(self, where: Any):
            assert where == torch.device(WHERE_NAME, 0)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *raised: object) -> None:
            pass


module = LateModule()


class LateTensor(torch.Tensor):
    """A tensor of the device; `values` is its memory, in which values appear late."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> LateTensor:
        made: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=torch.device(WHERE_NAME, 0)
        )
        made.values = values
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LateTensor({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        to_host = "device" in kwargs and kwargs["device"] is not None and kwargs["device"].type == "cpu"
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        name = func._schema.name.partition("::")[2]
        plain: Any = tree_map(_values, (args, kwargs))
        if func.is_view:
            return tree_map(_late, func(*plain[0], **plain[1]))
        changes_host = name.endswith("_") and not isinstance(args[0], LateTensor)
        if to_host or changes_host or name in _AT_ONCE or torch.Tag.nondeterministic_seeded in func.tags:
            module.device_of_tests.drain()
            found = _with_own_numbers(func, *plain)
            return args[0] if name.endswith("_") else found if to_host else tree_map(_late, found)
        if name.endswith("_") or "out" in kwargs:
            _compute(func, (args, kwargs), None)
            return args[0] if name.endswith("_") else kwargs["out"]
        made = _like(func(*tree_map(_without_values, plain[0]), **tree_map(_without_values, plain[1])))
        _compute(func, (args, kwargs), made)
        return tree_map(_late, made)


def _values(each: Any) -> Any:
    return each.values if isinstance(each, LateTensor) else each


def _taken(each: Any) -> Any:
    """What a computation works with later: memory of the device, and values of the host as they are now."""
    if isinstance(each, LateTensor):
        return each.values
    return each.clone() if isinstance(each, torch.Tensor) else each


def _late(each: Any) -> Any:
    return LateTensor(each) if isinstance(each, torch.Tensor) else each


def _without_values(each: Any) -> Any:
    if isinstance(each, torch.Tensor):
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
    return torch.device("meta") if isinstance(each, torch.device) else each


def _like(shown: Any) -> Any:
    """Memory for tensors of these shapes, with nothing meant in it."""

    def memory(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        made = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
        poison(made)
        return made

    return tree_map(memory, shown)


def _compute(func: Any, given: Any, made: Any) -> None:
    args, kwargs = tree_map(_taken, given)

    def carry_out() -> None:
        found = func(*args, **kwargs)
        if made is not None:
            for target, each in zip(_tensors(made), _tensors(found), strict=True):
                target.copy_(each)

    module.device_of_tests.compute(carry_out)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, tree)
    return found


def _with_own_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with the random numbers of the device."""
    before = torch.get_rng_state()
    torch.set_rng_state(module.random)
    try:
        return func(*args, **kwargs)
    finally:
        module.random = torch.get_rng_state()
        torch.set_rng_state(before)


def install() -> None:
    """Make the device known to torch, once in a process. Raises ImportError if torch takes none in Python."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(WHERE_NAME, module)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _kept.append(library)


_kept: list[Any] = []
"""A library that is dropped takes its functions back."""


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> LateTensor:
    return LateTensor(_like(torch.empty(size, dtype=dtype, memory_format=memory_format, device="meta")))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> LateTensor:
    return LateTensor(_like(torch.empty_strided(size, stride, dtype=dtype, device="meta")))
