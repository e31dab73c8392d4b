"""What modules hold besides parameters, buffers and modules, such as an auxiliary loss of the last pass.

A pass that computes lost samples again stores there, too. The loop, and a pass that is under way, must find
what they have stored themselves. Lists, dicts, sets and deques stay the same objects, as others may know
them: their contents are exchanged.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SEQUENCES = (list, deque)
_MAPPINGS = (dict, defaultdict, OrderedDict)
_CONTAINERS = (*_SEQUENCES, *_MAPPINGS, set)


class Attributes(NamedTuple):
    """The `attributes` of modules, and the contents of `containers` in them, of whatever depth."""

    attributes: list[tuple[nn.Module, dict[str, Any]]]
    containers: list[tuple[Any, Any]]


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """The attributes of modules as they are now."""
    attributes = [(module, dict(vars(module))) for module in modules]
    found: dict[int, tuple[Any, Any]] = {}
    left = [value for _, held in attributes for key, value in held.items() if key not in _OF_EVERY_MODULE]
    while left:
        value = left.pop()
        if type(value) in _CONTAINERS and id(value) not in found:
            found[id(value)] = (value, value.copy())
            left += value.values() if isinstance(value, dict) else value
    return Attributes(attributes, list(found.values()))


def put(kept: Attributes) -> None:
    """Let the modules hold these attributes, and no others, and their containers what they held then."""
    for module, held in kept.attributes:
        own = vars(module)
        for key in own.keys() - held.keys():
            del own[key]
        own.update(held)
    for container, contents in kept.containers:
        container.clear()
        container.extend(contents) if isinstance(container, _SEQUENCES) else container.update(contents)
