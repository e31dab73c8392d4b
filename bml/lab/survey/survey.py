"""The survey of a fabric: what sets of 0, 1, ... failures cost, each as likely as the others of its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from bml.lab.survey.cost import Cost, needed
from bml.lab.survey.likeness import Form, likeness
from bml.lab.survey.sets import Sets, parts_of, sets_of
from bml.topology import Fabric, Failure, UsageError

_DEVIATIONS = 1.959964
"""Standard deviations on both sides of the mean between which 95 % of a normal distribution lie."""

Costs = Callable[[Sequence[frozenset[Failure]]], Iterable[Cost]]
"""Prices sets of failures in their order."""


@dataclass(frozen=True)
class Case:
    """A set of failures, what it costs, and for how many sets it stands."""

    failures: frozenset[Failure]
    cost: Cost
    n_like: int


@dataclass(frozen=True)
class Interval:
    """An estimate, and where the true value is with 95 % confidence; a point if it is exact.

    The interval of a mean is a point, too, where all draws took the same time.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What sets of so many failures cost.

    Attributes:
        n_failures: failures in each.
        n_sets: sets that there are.
        exact: whether the cases stand for all of them; else for a sample.
        cases: those that differ.
    """

    n_failures: int
    n_sets: int
    exact: bool
    cases: tuple[Case, ...]

    @cached_property
    def n_counted(self) -> int:
        """Sets for which the cases stand: all, or those of the sample."""
        return sum(case.n_like for case in self.cases)

    @property
    def connected(self) -> Interval:
        """Share of sets whose survivors all reach one another; for a sample, Wilson's interval."""
        share = sum(case.n_like for case in self._with_time) / self.n_counted
        if self.exact:
            return Interval(share, share, share)
        n, z = self.n_counted, _DEVIATIONS
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return Interval(share, max(0.0, middle - half), min(1.0, middle + half))

    @property
    def mean(self) -> Interval | None:
        """Mean time of the sets that leave the survivors connected, in units of T; None if none does."""
        cases = self._with_time
        if not cases:
            return None
        n = sum(case.n_like for case in cases)
        mean = sum(_time(case) * case.n_like for case in cases) / n
        if self.exact:
            return Interval(mean, mean, mean)
        spread = sum((_time(case) - mean) ** 2 * case.n_like for case in cases) / max(1, n - 1)
        half = _DEVIATIONS * math.sqrt(spread / n)
        return Interval(mean, max(0.0, mean - half), mean + half)

    def quantile(self, share: float) -> float | None:
        """Return the least time that this share of the connected sets does not exceed; None if none is."""
        cases = sorted(self._with_time, key=_time)
        left = math.ceil(share * sum(case.n_like for case in cases))
        for case in cases:
            left -= case.n_like
            if left <= 0:
                return _time(case)
        return None

    @property
    def most_over_bound(self) -> float | None:
        """The largest ratio of a time to the least one proved for that set; None if no set is connected."""
        return max((float(case.cost.over_bound) for case in self._with_time), default=None)

    def worst(self, n: int) -> list[Case]:
        """Return the cases that cost most: those that take the fabric apart, then by time."""
        return sorted(self.cases, key=_severity, reverse=True)[:n]

    @cached_property
    def _with_time(self) -> list[Case]:
        return [case for case in self.cases if case.cost.gst is not None]


@dataclass(frozen=True)
class Survey:
    """What failures cost on a fabric: a row for each number of failures, from none on."""

    fabric: Fabric
    rows: tuple[Row, ...]


def survey(fabric: Fabric, most_failures: int, n_samples: int, seed: int, costs: Costs) -> Survey:
    """Look at all sets of up to so many failures, or at `n_samples` random ones of a number of them.

    Each set is planned once, and those that a symmetry of the fabric maps onto it are not: their plans may
    take up to 1 % more or less (see likeness.py).

    Raises:
        UsageError: the fabric has fewer parts than failures.
    """
    if most_failures > (n_parts := len(parts_of(fabric))):
        raise UsageError(f"{fabric.name} has {n_parts} parts, {most_failures} of them cannot fail")
    rows = list(sets_of(fabric, most_failures, n_samples, seed))
    form = likeness(fabric).form
    forms: list[list[Form]] = []
    example: dict[Form, frozenset[Failure]] = {}
    for each in rows:
        forms.append([])
        for failures, _ in each.found:
            least = needed(fabric, failures)
            forms[-1].append(form(least))
            example.setdefault(forms[-1][-1], least)
    known = dict(zip(example, costs(list(example.values())), strict=True))
    return Survey(
        fabric, tuple(_row(n, *pair, known) for n, pair in enumerate(zip(rows, forms, strict=True)))
    )


def _row(n_failures: int, sets: Sets, forms: list[Form], known: dict[Form, Cost]) -> Row:
    cases = [
        Case(failures, known[form], n_like)
        for (failures, n_like), form in zip(sets.found, forms, strict=True)
    ]
    return Row(n_failures, sets.total, sets.exact, tuple(cases))


def _time(case: Case) -> float:
    assert case.cost.gst is not None
    return float(case.cost.gst)


def _severity(case: Case) -> tuple[int, Fraction, int]:
    """What falls apart is worst, and then what leaves fewest servers together."""
    if case.cost.gst is None:
        return 1, -Fraction(case.cost.largest), case.n_like
    return 0, case.cost.gst, case.n_like
