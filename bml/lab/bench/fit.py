"""Fits the five constants of the cost model to measured times. Pure.

Every experiment is a line of the model, time = α·rounds + β·wire + γ·added + δ·touched + ε·incast, with the
last four in bytes. The constants are the non-negative least squares solution of all lines together, each
divided by its measured time: a relative error counts the same for microseconds and for milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations

import numpy as np
import numpy.typing as npt

from bml.errors import UsageError
from bml.schedule.select.model import Constants

_Matrix = npt.NDArray[np.float64]
NAMES = tuple(field.name for field in fields(Constants))


@dataclass(frozen=True)
class Work:
    """What an experiment does, in the terms of the model; all but the rounds in bytes."""

    rounds: int = 0
    wire: int = 0
    added: int = 0
    touched: int = 0
    incast: int = 0

    def seconds(self, constants: Constants) -> float:
        """What the model says that it takes."""
        pairs = zip(astuple(self), astuple(constants), strict=True)
        return float(sum(count * constant for count, constant in pairs))


@dataclass(frozen=True)
class Sample:
    """A measured time, in words and in the terms of the model."""

    what: str
    work: Work
    seconds: float


def pull(senders: int, nbytes: int) -> Work:
    """One server asks `senders` others, and each of them sends it `nbytes` over one NIC."""
    crowd = senders * (senders + 1) if senders > 1 else 0
    return Work(rounds=2, wire=senders * nbytes, incast=crowd * nbytes)


def addition(partials: int, nbytes: int) -> Work:
    """One server adds `partials` partial sums to its own vector of `nbytes`; 0 is a copy."""
    return Work(added=partials * nbytes, touched=(partials + 2) * nbytes)


def fit(samples: Sequence[Sample]) -> Constants:
    """Return the constants that explain the samples best.

    Raises:
        UsageError: some constant has no influence on any sample.
    """
    lines = np.array([np.array(astuple(sample.work), float) / sample.seconds for sample in samples])
    silent = [name for name, column in zip(NAMES, lines.T, strict=True) if not column.any()]
    if silent:
        raise UsageError(f"no sample depends on {', '.join(silent)}: it cannot be fitted")
    # Columns differ by many orders of magnitude. They are scaled, so that the solver has numbers of about 1.
    scale = np.abs(lines).max(axis=0)
    found = _non_negative(lines / scale, np.ones(len(samples))) / scale
    return Constants(*map(float, found))


def _non_negative(lines: _Matrix, times: _Matrix) -> _Matrix:
    """Solve least squares with x >= 0 exactly, by trying every set of unknowns above 0."""
    width = lines.shape[1]
    best, best_error = np.zeros(width), float(times @ times)
    for size in range(1, width + 1):
        for free in combinations(range(width), size):
            chosen, *_ = np.linalg.lstsq(lines[:, free], times, rcond=None)
            error = float(np.sum((lines[:, free] @ chosen - times) ** 2))
            if (chosen >= 0).all() and error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(width), error
                best[list(free)] = chosen
    return best
