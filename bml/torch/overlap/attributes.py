"""What modules hold besides parameters, buffers and modules, such as an auxiliary loss of the last pass.

A pass that computes lost samples again stores there, too. The loop, and a pass that is under way, must find
what they have stored themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn

Attributes = list[tuple[nn.Module, dict[str, Any]]]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_COPIED = (list, dict, set, deque)


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """The attributes of modules as they are now."""
    return [(module, dict(vars(module))) for module in modules]


def copied(attributes: Attributes) -> Attributes:
    """The same with copies of lists, dicts and sets, which a pass changes in place; one for each."""
    copies: dict[int, Any] = {}

    def of(key: str, value: Any) -> Any:
        if type(value) not in _COPIED or key in _OF_EVERY_MODULE:
            return value
        return copies.setdefault(id(value), value.copy())

    return [(module, {key: of(key, value) for key, value in held.items()}) for module, held in attributes]


def put(attributes: Attributes) -> None:
    """Let the modules hold these attributes, and no others."""
    for module, held in attributes:
        own = vars(module)
        for key in own.keys() - held.keys():
            del own[key]
        own.update(held)
