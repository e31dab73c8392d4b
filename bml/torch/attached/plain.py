"""Values of optimizers and schedulers in the form that a session gives to servers that join, and back.

A session takes numbers, texts, None, arrays, lists, and dicts with texts as keys. Here tuples stay tuples,
keys may be numbers, and tensors stay tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

_DICT, _COUNTER, _TUPLE, _TENSOR = "dict", "counter", "tuple", "tensor"


def packed(value: Any) -> Any:
    """Return the value in a form for `Session.state_fn`, which refuses what is none of the above."""
    if isinstance(value, torch.Tensor):
        return {_TENSOR: value.detach().cpu().numpy()}
    if isinstance(value, Mapping):
        kind = _COUNTER if isinstance(value, Counter) else _DICT
        return {kind: [[packed(key), packed(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [packed(each) for each in value]}
    if isinstance(value, list):
        return [packed(each) for each in value]
    return value


def unpacked(value: Any) -> Any:
    """Return the value that `packed` was given."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == _TENSOR:
        return torch.from_numpy(inner)
    if kind == _TUPLE:
        return tuple(unpacked(each) for each in inner)
    pairs = {unpacked(key): unpacked(each) for key, each in inner}
    return Counter(pairs) if kind == _COUNTER else pairs
