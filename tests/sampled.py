"""What `make test` takes of a long list of cases. The others are marked slow, for `make gate`.

Where any case will do, the mark `few(n)` has n of them drawn (tests/gate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def first(n_taken: int, cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters; those after the first so many are for the gate."""
    return [_parameter(case, number < n_taken) for number, case in enumerate(cases)]


def chosen(is_taken: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters; those of which the function does not say so are for the gate."""
    return [
        _parameter(case, is_taken(*case) if isinstance(case, tuple) else is_taken(case)) for case in cases
    ]


def one_of_each(kind: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """The cases as parameters; of each kind one is taken: of the first kind its first, and so on by turns."""
    kinds: dict[Any, list[int]] = {}
    for number, case in enumerate(cases):
        kinds.setdefault(kind(*case), []).append(number)
    taken = {numbers[turn % len(numbers)] for turn, numbers in enumerate(kinds.values())}
    return [_parameter(case, number in taken) for number, case in enumerate(cases)]


def _parameter(case: Any, is_taken: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[] if is_taken else [pytest.mark.slow])
