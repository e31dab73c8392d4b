"""A proved lower bound on the synchronisation time of any forest, and whether it is the optimum itself.

Give every usable NIC i a price y_i >= 0. In any forest, whatever its roots, shares, relays or phases,
each piece is reduced on edges that join all live servers, and broadcast on such edges again; a hop
over NICs i and j costs y_i + y_j per unit of P that it carries. So both phases together cost at least
2·MST(y) for all of P, MST(y) being the cheapest tree that joins all servers. On the other hand no NIC of
rate r_i can send more than r_i·GST, nor receive more, so they cost at most 2·GST·Σ r_i y_i; r_i is no
more than the rates of all other NICs of its group together, which are what it sends to. Hence

    GST >= MST(y) / Σ r_i y_i    for any prices y.

That is the proof; it is evaluated here in exact integers and fractions, so that no rounding of a solver
can make a bound too high. The cut bounds are two simple choices of y. The best y solves a linear programme
(`bound_lp`), whose dual is the best packing of spanning trees: where it is solved to the end, the bound is
the optimum of all forests, reached by ideal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isfinite

from bml.schedule.bounds.lp import best_prices
from bml.schedule.bounds.symmetry import alike
from bml.schedule.ir.nics import cut_bound, number_nics, price_bound
from bml.topology import Fabric

_Prices = Sequence[int]

OPTIMUM = "optimum"
"""Kind of a bound that ideal shares of spanning trees reach (to 1e-7, the linear programme's accuracy)."""
LOWER_BOUND = "lower bound"
"""Kind of a bound that is proved, but possibly not the best one."""

_TOLERANCE = Fraction(1, 10**7)
"""Relative distance from the programme's value below which a bound counts as the optimum."""
_MOST_NICS = 20000
"""Above, nothing but the cut bounds is computed."""
_MULTIPLES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 24, 60)
"""Prices of a solution often are multiples of such fractions of the lowest one."""
_FINE = 1 << 24
"""Integer that stands for the highest price where they are not."""


@dataclass(frozen=True)
class Bound:
    """The time that no schedule can beat.

    Attributes:
        value: lower bound on the pipelined GST, in units of T = P/B.
        kind: OPTIMUM or LOWER_BOUND.
    """

    value: Fraction
    kind: str


def bound(fabric: Fabric) -> Fraction:
    """Lower bound on the pipelined GST of any forest, in units of T = P/B; see `prove`."""
    return prove(fabric).value


def bound_kind(fabric: Fabric) -> str:
    """Say what `bound` is: OPTIMUM, or LOWER_BOUND if the linear programme was too large to be solved."""
    return prove(fabric).kind


@lru_cache(maxsize=1024)
def prove(fabric: Fabric) -> Bound:
    """Compute the best bound that we can prove on the pipelined GST of any forest.

    Raises:
        FabricError: some live server has no usable NIC while others live, so no plan exists.
    """
    nics = number_nics(fabric)
    cut = cut_bound(nics)
    if len(nics.servers) <= 2:
        # One survivor sends nothing; of two each sends once over all cables, each as fast as its slower end.
        return Bound(cut, OPTIMUM)
    solved = best_prices(nics, alike(nics)) if len(nics.owner) <= _MOST_NICS else None
    if solved is None:
        return Bound(cut, LOWER_BOUND)
    value = max([cut, *(price_bound(nics, prices) for prices in _whole(solved.prices))])
    # A solver that gives up, as on rates that differ by eight digits or more, knows no ceiling.
    reached = isfinite(solved.ceiling) and Fraction(solved.ceiling) <= value * (1 + _TOLERANCE)
    return Bound(value, OPTIMUM if reached else LOWER_BOUND)


def _whole(prices: list[float]) -> list[_Prices]:
    """Write prices as integers: exactly in proportion if that can be seen, and finely rounded."""
    highest = max(prices)
    found: list[_Prices] = [[round(price / highest * _FINE) for price in prices]]
    lowest = min(price for price in prices if price > highest * 1e-6)
    for multiple in _MULTIPLES:
        scaled = [price / lowest * multiple for price in prices]
        whole = [round(price) for price in scaled]
        if all(abs(a - b) < 1e-5 * max(1.0, a) for a, b in zip(scaled, whole, strict=True)):
            found.append(whole)
            break
    return found
