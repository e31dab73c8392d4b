"""The values of metrics at one moment, as they travel from a server to its launcher."""

from __future__ import annotations

from typing import NamedTuple


class Distribution(NamedTuple):
    """The value of a histogram: how many values are up to each bound, and in all, and their sum."""

    cumulative: list[int]
    total: float


Value = float | Distribution


class Sample(NamedTuple):
    """One value of a metric of `table.TABLE`; `labels` are the values of its own labels, in order."""

    metric: str
    labels: tuple[str, ...]
    value: Value
