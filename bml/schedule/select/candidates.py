"""The schedules from which `auto` takes that of least modelled time for a size, planning few of the others.

A candidate is planned only if, by counts that it cannot be below, it may save a share of the time. All
servers of a view have the same fabric and constants and so choose alike without a message. What a server has
planned before, for another size, saves it work but never changes its choice.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, TypeAlias

from bml.schedule.packed.packing import fits
from bml.schedule.select.cases import MOST_SERVERS
from bml.schedule.select.least import least_of_exchange, least_of_mesh, least_of_trees
from bml.schedule.select.model import Constants, Counts, Price
from bml.schedule.select.plan import Plan
from bml.topology import BCube, Fabric, FabricError, Graph

_SOONER = 2
"""A healthy graph is planned once, before the first step: so many times as many servers are no hindrance."""
_WORTH = 1.04
"""How many times as long the best schedule so far must take for another one to be planned: by its least."""
_TIE = 1.005
"""How many times as long a schedule may take and still be as good as the best: then frames decide."""
_MOST_COMPARED = 36
"""Servers of a fabric up to which there are other trees than the usual ones: a mesh of more servers takes
longer to plan than it saves in many steps."""
_Least: TypeAlias = Callable[[Fabric], Counts | None]
"""Counts of a fabric that a candidate cannot be below; None if it is seen at once that it cannot work."""


class _Line(NamedTuple):
    """Modelled time as a function of the size."""

    start_s: float
    per_byte_s: float

    @classmethod
    def of(cls, counts: Counts, constants: Constants) -> _Line:
        return cls(counts.start_s(constants), counts.per_byte_s(constants))

    def seconds(self, nbytes: int) -> float:
        return self.start_s + nbytes * self.per_byte_s


class Candidates:
    """The candidates of a connected fabric and their prices.

    The model counts what servers do one after the other, so trees in which one server passes on more frames
    than in others may have the same time. Of equal candidates the one with the fewest frames is taken.

    `patient`: trees are packed on large fabrics too, which takes longer than a step should wait.
    """

    def __init__(self, fabric: Fabric, constants: Constants, patient: bool = False):
        self._constants = constants
        usual, why = usual_algorithm(fabric, patient)
        found = _counted_least(fabric, usual)
        self._least = {
            name: _Line.of(counts, constants)
            for name, least in found.items()
            if (counts := least(fabric)) is not None
        }
        self._plans = {name: Plan(fabric, name, why if name == usual else "") for name in self._least}
        self._lines: dict[str, _Line | None] = {}
        self._frames: dict[str, int] = {}
        self._compares_frames = fabric.n_servers <= _MOST_COMPARED

    def best(self, nbytes: int) -> Plan:
        """Return the plan of least modelled time for so many bytes, or one that is 5 % slower at most.

        Raises:
            UsageError: a schedule is too large to be counted.
        """
        if len(self._plans) == 1:
            return next(iter(self._plans.values()))
        best_s = inf
        found: dict[str, float] = {}
        for name in self._plans:
            if self._least[name].seconds(nbytes) * _WORTH > best_s:
                continue
            line = self._line(name)
            if line is not None:
                found[name] = line.seconds(nbytes)
                best_s = min(best_s, found[name])
        equal = [name for name, seconds in found.items() if seconds <= best_s * _TIE]
        if not equal:
            return next(iter(self._plans.values()))
        if len(equal) > 1:
            equal.sort(key=lambda name: (self._n_frames(name), found[name]))
        return self._plans[equal[0]]

    def prices(self, nbytes: int) -> list[Price]:
        """Return what each candidate costs: the best one first, then by their time, then those without.

        Candidates that need not be planned have no time of their own.

        Raises:
            UsageError: as `best`.
        """
        taken = self.best(nbytes).algorithm
        if len(self._plans) == 1:
            self._line(taken)
        found = [self._price(name, nbytes) for name in self._plans]
        return sorted(found, key=lambda price: (price.algorithm != taken, price.seconds or inf))

    def plan_all(self) -> None:
        """Plan every candidate, so that later choices are quick."""
        for name in self._plans:
            self._line(name)

    def _line(self, name: str) -> _Line | None:
        if name not in self._lines:
            try:
                self._lines[name] = _Line.of(self._plans[name].counts(), self._constants)
            except FabricError:
                self._lines[name] = None
        return self._lines[name]

    def _n_frames(self, name: str) -> int:
        """Frames of the busiest server; 0 on large fabrics, where to count them takes long."""
        if name not in self._frames:
            self._frames[name] = self._plans[name].frames() if self._compares_frames else 0
        return self._frames[name]

    def _price(self, name: str, nbytes: int) -> Price:
        least_s = self._least[name].seconds(nbytes)
        if name not in self._lines:
            return Price(name, least_s, None)
        line = self._lines[name]
        return Price(name, least_s, line and line.seconds(nbytes), line is not None)


def usual_algorithm(fabric: Fabric, patient: bool = True) -> tuple[str, str]:
    """Return the algorithm that suits vectors so large that only their bytes count, and the reason.

    `patient`: see `Candidates`.
    """
    is_graph = isinstance(fabric.wiring, Graph)
    most: float = MOST_SERVERS if fabric.failures else _SOONER * MOST_SERVERS if is_graph else inf
    if isinstance(fabric.wiring, BCube) and not any(fabric.nic_alive(*link) for link, _ in fabric.rates):
        most = inf  # only broken trees are mended
    if fabric.failures:
        state = "the fabric is damaged"
    elif fabric.rates:
        state = "links differ in rate"
    elif is_graph:
        state = "the fabric is a graph"
    else:
        return "bml", "the fabric is healthy: all levels work at once"
    if fits(fabric) and (patient or fabric.n_servers <= most):
        return "packed", f"{state}: spanning trees packed into what is left load all NICs alike"
    return "detour", f"{state}, and too large to be packed: detours round the damage"


def _counted_least(fabric: Fabric, usual: str) -> dict[str, _Least]:
    """Return the candidates, those first that are planned sooner, each with what counts its least.

    On a healthy BCube `packed` would be the same trees as `bml`.
    """
    if fabric.n_servers > _MOST_COMPARED or _all_trees_are_stars(fabric):
        return {usual: least_of_trees, "exchange": least_of_exchange}
    paper = "detour" if fabric.failures else "bml"
    found: dict[str, _Least] = {paper: least_of_trees, "exchange": least_of_exchange, "mesh": least_of_mesh}
    if not (isinstance(fabric.wiring, BCube) and usual == "bml"):
        found["packed"] = least_of_trees
    return found


def _all_trees_are_stars(fabric: Fabric) -> bool:
    """Whether one switch of links that are alike joins all servers, so that the mesh is the best of trees."""
    return fabric.levels == 1 and not fabric.rates
