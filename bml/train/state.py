"""The training state that a training function names: arrays changed in place, and values behind functions."""

from __future__ import annotations

import hashlib
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from bml.protocol.step.workspace import Array
from bml.topology.errors import UsageError

Load = Callable[[Any], None]
Save = Callable[[], Any]
Value = TypeVar("Value")

_PARAMS = "params"
OTHERS = "the others have"
"""Begins to say what the giver of a state has named: the servers of a running job."""
_PATIENCE = 10
"""After how many committed steps a warning says that parameters have not changed."""
_SAMPLE = 1 << 22
_NOTHING_NAMED = (
    "the training function has named nothing that a joiner, or a checkpoint, could be given: name what it "
    "changes with session.state or session.state_fn before its first loop (session.state() alone says that "
    "nothing is kept from step to step)"
)
_NO_NUMBERS = (
    "has elements that are no numbers (NaN): look at what each server contributes, before it is summed"
)
_REBOUND = "`w = w - g` makes a new array that the session does not know; write `w -= g`"
_HELD_ONCE = [object()]
_NOT_HELD_ELSEWHERE = sys.getrefcount(_HELD_ONCE[0])
"""The reference count of an object that only one container, or one array with it as its base, holds."""


class Mirror(ABC):
    """An array in the place of values elsewhere, such as those of a tensor on an accelerator."""

    @abstractmethod
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The array, always the same one."""

    @abstractmethod
    def read(self) -> None:
        """Bring the array up to date."""

    @abstractmethod
    def write(self) -> None:
        """Give the values those of the array."""


class NamedState:
    """The named state of one session. `is_new`: a named value was not yet made equal on all servers."""

    def __init__(self) -> None:
        self.is_new = False
        self._values: dict[str, Any] = {}
        self._functions: dict[str, tuple[Load, Save]] = {}
        self._watch: tuple[int, int, int] | None = None
        self._changes = False
        self._numbers_at: float = _PATIENCE
        self._stands_still = False
        self._is_named = False

    def name(self, values: Mapping[str, Any]) -> None:
        """Add arrays, or lists or dicts of them. A name that was given before gets the new arrays.

        Without any it says that there is no state. Raises UsageError for values that cannot be sent to a
        joiner.
        """
        for name, value in values.items():
            for _, array in _finite(partial(_listed, value, name), name):
                if not array.flags.writeable:
                    raise UsageError(
                        f"the state {name!r} has a read-only array: joiners get their state in it"
                    )
        self._values.update(values)
        self.is_new = self._is_named = True

    def name_function(self, key: str, load: Load, save: Save) -> None:
        """Add a value that `save` returns and `load` takes. Raises UsageError as `packed` does."""
        value = save()
        msgspec.msgpack.encode(_finite(partial(packed, value, key), key))
        self._functions[key] = (load, save)
        self.is_new = self._is_named = True

    def arrays(self) -> list[Array]:
        """Return all arrays, in order of their names."""
        self._read()
        return [array for _, array in leaves(self._values, "")]

    def fill(self, data: npt.NDArray[np.uint8]) -> int:
        """Fill all arrays from `data`, which has their bytes in order; returns how many bytes were read."""
        at = 0
        for _, array in leaves(self._values, ""):
            # A copy, as views of another dtype must begin at a multiple of its size.
            array[...] = np.frombuffer(data[at : at + array.nbytes].tobytes(), array.dtype).reshape(
                array.shape
            )
            at += array.nbytes
        for each in _mirrors(self._values):
            each.write()
        return at

    @property
    def kinds(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each array."""
        return [(name, array.dtype.str, array.shape) for name, array in leaves(self._values, "")]

    @property
    def keys(self) -> list[str]:
        """The names of the values behind functions."""
        return sorted(self._functions)

    def saved(self) -> bytes:
        """Return the values behind functions, as bytes."""
        return msgspec.msgpack.encode({key: packed(self._functions[key][1](), key) for key in self.keys})

    def load(self, saved: bytes, giver: str = OTHERS) -> None:
        """Give the functions the values that `saved` returned elsewhere. Raises UsageError for other keys."""
        values = msgspec.msgpack.decode(saved)
        if sorted(values) != self.keys:
            raise UsageError(
                f"this server begins with state_fn for {self.keys}, {giver} {sorted(values)}: "
                "name the same values before the first training loop"
            )
        for key, value in values.items():
            self._functions[key][0](unpacked(value))

    def digest(self, whole: bool = False) -> str:
        """Return the sha256 of `params`, or of all arrays if no name is `params`; empty without arrays.

        With `whole` it is that of the whole state, including the values behind functions.
        """
        value = self._values if whole else self._values.get(_PARAMS, self._values)
        self._read(value)
        arrays = [array for _, array in leaves(value, "")]
        if not arrays and not (whole and self._functions):
            return ""
        sha = hashlib.sha256()
        for array in arrays:
            sha.update(raw(array).data)
        if whole:
            sha.update(self.saved())
        return sha.hexdigest()

    def watch(self, step: int) -> str:
        """Look at a boundary of a training loop, after this step, whether the parameters change.

        Returns a warning, once, if they were the same for ten committed steps: the training function has
        probably bound their name to new arrays; and if one is NaN, which is looked for after about 10,
        100, 1000 … steps, as it may be far to the values.
        """
        return self._unchanged(step) or (self._numbers(step) if step >= self._numbers_at else "")

    def nan(self) -> list[str]:
        """Return the names of the arrays with NaN: those of `params`, or of all arrays if no name is that."""
        value, name = (self._values[_PARAMS], _PARAMS) if _PARAMS in self._values else (self._values, "")
        self._read(value)
        return [each for each, array in leaves(value, name) if array.dtype.kind in "fc" and _has_nan(array)]

    def _numbers(self, step: int) -> str:
        found = self.nan()
        self._numbers_at = inf if found else 10 * step
        names = ", ".join(found[:5])
        return f"after step {step} {names} of the state {_NO_NUMBERS}" if found else ""

    def _unchanged(self, step: int) -> str:
        if self._changes or _PARAMS not in self._values:
            return ""
        if self._watch is None:
            self._read()
            self._watch = (step, _sample(self._values[_PARAMS]), _sample(self._values))
        elif step >= self._watch[0] + _PATIENCE:
            self._changes = True  # also after the warning, which is shown once
            self._read(self._values[_PARAMS])
            if self._watch[1] == _sample(self._values[_PARAMS]):
                self._stands_still = True
                return (
                    f"the parameters named with session.state have not changed in {_PATIENCE} steps: "
                    f"{_REBOUND}"
                )
        return ""

    def check_in_use(self) -> None:
        """Raise UsageError if the training function named nothing, or does not use the named arrays.

        The latter is certain of an array that only the session holds, and assumed if no named array has
        changed in ten steps or more. A joiner would be given these arrays, and compute wrong gradients.
        """
        if not self._is_named:
            raise UsageError(_NOTHING_NAMED)
        for name in self._values:
            if not _is_held(self._values, name):
                raise UsageError(
                    f"the training function no longer uses an array of the state {name!r}: {_REBOUND}, or "
                    "name the new one"
                )
        if self._stands_still and self._watch is not None:
            self._read()
            if self._watch[2] == _sample(self._values):
                raise UsageError(f"nothing that was named with session.state has ever changed: {_REBOUND}")

    def _read(self, value: Any = None) -> None:
        """Bring the arrays of a value, by default of all, up to date where they mirror something else."""
        for each in _mirrors(self._values if value is None else value):
            each.read()


def _sample(value: Any) -> int:
    """Return a check sum of all elements of small arrays, and of some elements of large ones, to be quick."""
    total = 0
    for _, array in leaves(value, ""):
        flat = array.reshape(-1)
        total = zlib.crc32(raw(flat[:: flat.size // _SAMPLE + 1]).data, total)
    return total


def _has_nan(array: Array) -> bool:
    # minimum keeps NaN, and needs no array as large as this one
    return array.size > 0 and bool(np.isnan(np.minimum.reduce(array, axis=None)))


def _listed(value: Any, name: str) -> list[tuple[str, Array]]:
    return list(leaves(value, name))


def _finite(read: Callable[[], Value], name: str) -> Value:
    """Return `read()`. Raises UsageError if the named value contains itself."""
    try:
        return read()
    except RecursionError:
        raise UsageError(f"the state {name!r} contains itself, or is nested too deeply") from None


def leaves(value: Any, name: str) -> Iterator[tuple[str, Array]]:
    """Yield the names and arrays in a value: an array, or lists or dicts (in order of keys); None has none.

    Raises UsageError, with the `name` under which it was given, for anything else.
    """
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UsageError(f"the state {name!r} has keys that are not texts: {list(value)[:5]}")
        for key in sorted(value):
            yield from leaves(value[key], f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from leaves(each, f"{name}[{number}]")
    elif value is not None:
        if isinstance(value, np.generic) or not hasattr(value, "__array__"):
            raise UsageError(
                f"the state {name!r} is a {type(value).__name__}: name arrays, which are changed in place; "
                "for numbers and texts use session.state_fn"
            )
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise UsageError(
                f"the state {name!r} has dtype {array.dtype}: only numbers can be sent to joiners"
            )
        if isinstance(value, np.ma.MaskedArray) or (
            type(value) is not np.ndarray and array.size and not np.shares_memory(array, np.asarray(value))
        ):
            raise UsageError(
                f"the state {name!r} is a {type(value).__name__}, which numpy cannot write through: "
                "name plain arrays"
            )
        yield name, array


def _mirrors(value: Any) -> Iterator[Mirror]:
    """Yield the mirrors in a value, as `leaves` yields the arrays."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _mirrors(each)
    elif type(value) is not np.ndarray and isinstance(value, Mirror):
        yield value


def _is_held(container: Any, at: Any) -> bool:
    """Whether an object other than a container of the session may hold, or see, the value at this place."""
    if sys.getrefcount(container[at]) > _NOT_HELD_ELSEWHERE:
        return True
    value = container[at]
    if isinstance(value, list | tuple):
        return all(_is_held(value, number) for number in range(len(value)))
    if isinstance(value, dict):
        return all(_is_held(value, key) for key in value)
    return type(value) is not np.ndarray or _is_seen(value)


def _is_seen(array: Array) -> bool:
    """Whether another object may see the memory of an array that only the session holds."""
    while type(array.base) is np.ndarray:
        if sys.getrefcount(array.base) > _NOT_HELD_ELSEWHERE:
            return True
        array = array.base
    # An array of session.empty has a base of its own. Of other bases nothing is known.
    return array.base is not None and getattr(array.base, "on_gone", None) is None


def packed(value: Any, key: str) -> Any:
    """Return a value of a state function in a form for msgpack, without copies: encode it before it changes.

    Raises UsageError for other values.
    """
    if isinstance(value, np.ndarray | np.generic):  # before float and str, which numpy's scalars may be
        array = np.asarray(value, order="C")
        if array.dtype.kind not in "biufc":
            raise UsageError(f"the state function of {key!r} returned an array of dtype {array.dtype}")
        shape = list(array.shape) if isinstance(value, np.ndarray) else None
        return {"": [array.dtype.str, shape, raw(array).data]}
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, int):
        fits = -(1 << 63) <= value < 1 << 64
        return int(value) if fits else {"": ["int", None, str(int(value)).encode()]}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return {"": ["str", None, value.encode("utf-8", "surrogatepass")]}
    if isinstance(value, list | tuple):
        return [packed(each, key) for each in value]
    if isinstance(value, Mapping) and all(isinstance(each, str) and each for each in value):
        return {name: packed(each, key) for name, each in value.items()}
    raise UsageError(
        f"the state function of {key!r} returned a {type(value).__name__}: numbers, texts, bytes, arrays, "
        "and lists and dicts (with texts for keys) of them can be given to joiners"
    )


def unpacked(value: Any) -> Any:
    """Return the value that `packed` was given; tuples become lists."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if isinstance(value, dict):
        if "" in value:
            dtype, shape, data = value[""]
            if dtype == "int":
                return int(data)
            if dtype == "str":
                return data.decode("utf-8", "surrogatepass")
            array = np.frombuffer(data, dtype)
            return array[0] if shape is None else array.reshape(shape).copy()
        return {name: unpacked(each) for name, each in value.items()}
    return value


def raw(array: Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array in C order, without a copy if it is contiguous."""
    return np.asarray(array, order="C").reshape(-1).view(np.uint8)
