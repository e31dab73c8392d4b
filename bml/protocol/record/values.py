"""The values in a core's state and in its inputs as plain data, and back.

Plain data is what msgpack writes: None, numbers, texts, bytes, and lists that begin with a tag. Only the
classes of the modules below are made from it, by their fields, so a foreign file can run no code.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import msgspec

import bml.errors
import bml.topology.errors
from bml.faults import detector, healing, stalls, throughput
from bml.protocol.server import events, history, learner, transfer
from bml.protocol.step import dataflow, direct
from bml.protocol.wire import call, frame, messages
from bml.topology.errors import BmlError, UsageError

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_MODULES: tuple[ModuleType, ...] = (
    detector, healing, stalls, throughput, events, history, learner, transfer, dataflow, direct, call, frame,
    messages, bml.errors, bml.topology.errors,
)  # fmt: skip
_encode = msgspec.msgpack.Encoder().encode


class RecordingError(UsageError):
    """This is no recording of bml, or it is damaged."""


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


_CLASSES: dict[str, type] = {
    _name(each): each
    for module in _MODULES
    for each in vars(module).values()
    if isinstance(each, type) and each.__module__ == module.__name__
}


def plain(value: Any) -> Any:
    """Return a value as plain data; equal values give equal data. Raises TypeError for an unknown class."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple:
        return ["t", *_all_plain(value)]
    if kind is list:
        return ["l", *_all_plain(value)]
    if kind is dict:
        return ["d", *_all_plain([each for pair in value.items() for each in pair])]
    if kind is set or kind is frozenset:
        return ["s" if kind is set else "f", *sorted(_all_plain(value), key=_encode)]
    if kind is deque:
        return ["q", value.maxlen, *_all_plain(value)]
    return _plain_object(value, kind)


def _all_plain(values: Any) -> list[Any]:
    return [each if type(each) in _ATOMS else plain(each) for each in values]


def _plain_object(value: Any, kind: type) -> list[Any]:
    name = _name(kind)
    if name not in _CLASSES:
        raise TypeError(f"{name} is no class that a recording holds")
    if isinstance(value, Enum):
        return ["e", name, value.value]
    if isinstance(value, BmlError):
        return ["x", name, _all_plain(value.args), _all_plain(vars(value).items())]
    names = _fields(kind)
    if names is None:
        return ["v", name, *_all_plain(sorted(vars(value).items()))]
    return ["o", name, *_all_plain(getattr(value, each) for each in names)]


def _fields(kind: Any) -> tuple[str, ...] | None:
    """The names of the fields of a class; None if its instances have a dictionary alone."""
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    names: tuple[str, ...] | None = getattr(kind, "_fields", None)
    return names


def value_of(data: Any) -> Any:
    """Return the value of plain data. Raises RecordingError if it is that of none."""
    if type(data) in _ATOMS:
        return data
    try:
        return _value(data)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise RecordingError(f"damaged: {data!r:.80} is no value of a server's core ({error})") from None


def _value(data: list[Any]) -> Any:
    tag, *rest = data
    if tag == "t":
        return tuple(_values(rest))
    if tag == "l":
        return _values(rest)
    if tag == "d":
        values = _values(rest)
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag == "s":
        return set(_values(rest))
    if tag == "f":
        return frozenset(_values(rest))
    if tag == "q":
        return deque(_values(rest[1:]), maxlen=rest[0])
    name, *rest = rest
    kind: Any = _CLASSES[name]
    if tag == "e":
        return kind(*rest)
    if tag == "x":
        return _error(kind, *rest)
    if tag == "v":
        return _filled(kind, dict(_values(rest)))
    names = _fields(kind)
    if tag != "o" or names is None or len(names) != len(rest):
        raise ValueError(f"{name} has no {len(rest)} fields")
    values = _values(rest)
    filled = is_dataclass(kind)
    return _filled(_CLASSES[name], dict(zip(names, values, strict=True))) if filled else kind(*values)


def _values(data: list[Any]) -> list[Any]:
    return [each if type(each) in _ATOMS else _value(each) for each in data]


def _error(kind: type[BmlError], arguments: list[Any], attributes: list[Any]) -> BmlError:
    error = kind.__new__(kind)
    error.args = tuple(_values(arguments))
    vars(error).update(_values(attributes))
    return error


def _filled(kind: type, attributes: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
