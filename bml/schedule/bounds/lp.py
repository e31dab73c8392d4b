"""The best prices of NICs: max MST(y) subject to Σ r_i y_i = 1, a linear programme solved by cutting planes.

MST(y) is the least of the costs of all spanning trees, each linear in y, so it is concave: we solve the
programme for the trees seen so far, ask for the cheapest tree at its solution (and between it and the best
prices so far, which converges faster), add these trees, and go on until value and solution meet. The first
trees are packed one after the other, each the cheapest when the price of a NIC grows exponentially with
its load (multiplicative weights): most often the first solution is final then. Prices of NICs that a
symmetry maps onto one another may be taken equal: averaging over a symmetry group cannot lower a concave
function that does not change under it.

Source of the method: Kelley, "The cutting-plane method for solving convex programs", 1960; in-out points
as in Ben-Ameur and Neto, "Acceleration of cutting-plane and column generation algorithms", 2007; the first
trees as in Plotkin, Shmoys and Tardos, "Fast approximation algorithms for fractional packing and covering
problems", 1995.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bml.schedule.ir.nics import Nics, cheapest_tree

_MOST_CLASSES = 1100
"""Unknowns up to which the programme is tried."""
_MOST_ROUNDS = 400
"""Programmes solved before we are content with the best prices so far."""
_GAP = 1e-9
"""Relative gap at which value and solution have met."""
_STEPS = (1.0, 0.5, 0.2)
"""Where trees are asked for: at the solution (1) and on the way to it from the best prices so far."""

_Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Prices:
    """Result of the programme.

    Attributes:
        prices: NIC -> best price found, in no particular unit.
        ceiling: what no prices can exceed, in T, as far as the solver's accuracy goes; infinite if the
            solver gives up.
    """

    prices: list[float]
    ceiling: float


def best_prices(nics: Nics, kind: list[int]) -> Prices | None:
    """Solve the programme; `kind` says which NICs have one price. None if it is too large."""
    classes = max(kind) + 1
    if classes > _MOST_CLASSES:
        return None
    of_kind = np.array(kind)
    budget = np.bincount(of_kind, weights=[float(rate) for rate in nics.rate]).astype(np.float64)
    best = np.full(classes, 1 / budget.sum())
    trees = [_degrees(nics, of_kind, best), *_packed_one_by_one(nics, of_kind, budget)]
    value, ceiling = float(trees[0] @ best), np.inf
    for _ in range(_MOST_ROUNDS):
        solution = _solve(np.array(trees), budget)
        if solution is None:
            break
        outer, ceiling = solution
        if ceiling <= value * (1 + _GAP):
            break
        inner = best
        for step in _STEPS:
            point = step * outer + (1 - step) * inner
            tree = _degrees(nics, of_kind, point)
            trees.append(tree)
            if tree @ point > value:
                value, best = float(tree @ point), point
    return Prices(best[of_kind].tolist(), float(ceiling))


def _packed_one_by_one(nics: Nics, of_kind: NDArray[np.int64], budget: _Vector) -> list[_Vector]:
    """Two trees per class, each the cheapest under the load of those before it."""
    load, trees = np.zeros(len(budget)), []
    for _ in range(2 * len(budget)):
        use = load / budget
        tree = _degrees(nics, of_kind, np.exp(use - use.max()))
        trees.append(tree)
        load += tree
    return trees


def _degrees(nics: Nics, of_kind: NDArray[np.int64], price: _Vector) -> _Vector:
    """Count how often each class of NICs is in the cheapest tree."""
    edges = cheapest_tree(nics, price[of_kind].tolist())
    return np.bincount(of_kind[np.array(edges).ravel()], minlength=len(price)).astype(np.float64)


def _solve(trees: _Vector, budget: _Vector) -> tuple[_Vector, float] | None:
    """Prices that maximise the cheapest of some trees, and its cost; None if the solver gives up."""
    # Not at the top: it takes longer to load than all the rest, and servers that only plan do not need it.
    from scipy.optimize import linprog

    count, classes = trees.shape
    solved = linprog(
        np.append(np.zeros(classes), -1.0),
        A_ub=np.hstack([-trees, np.ones((count, 1))]),
        b_ub=np.zeros(count),
        A_eq=np.append(budget, 0.0)[None, :],
        b_eq=[1.0],
        bounds=(0, None),
        method="highs",
    )
    return (solved.x[:-1], float(-solved.fun)) if solved.status == 0 else None
