"""Schedules of damaged fabrics, built once for all failures that look alike, and kept with their counts.

Servers of a job plan again after every failure. A map of the healthy BCube onto itself carries the schedule
of one failure to any failure that looks alike (see `bml.schedule.packed.symmetry`), and changes no count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from bml.schedule.algorithms.registry import find
from bml.schedule.ir.forest import Forest
from bml.schedule.ir.symmetry import Symmetry
from bml.schedule.packed.symmetry import representative, without_repeats
from bml.schedule.select.model import Counts, counts
from bml.topology import Fabric

MOST_SERVERS = 64
"""Servers of a fabric up to which a job plans packed trees and meshes while a step waits for them. On larger
BCubes it mends the healthy trees."""
_ALIKE = ("bml", "mesh")
_KEPT = 96
"""Three algorithms on 32 fabrics."""
_KEPT_LARGE = 2
"""Of larger fabrics: 1024 servers have 15 to 40 MB of trees."""


@dataclass(frozen=True, eq=False)
class Case:
    """A schedule for a fabric, read-only. `fabric` stands for all that its symmetry maps to it."""

    fabric: Fabric
    forest: Forest

    @cached_property
    def counts(self) -> Counts:
        """Counts for the cost model."""
        return counts(self.forest, self.fabric)


def has_case(algorithm: str, fabric: Fabric) -> bool:
    """Whether schedules of this algorithm are kept for this fabric; no large ones are but packed trees."""
    small_and_damaged = bool(fabric.failures) and fabric.n_servers <= MOST_SERVERS
    name = find(algorithm)[0].name
    return name == "packed" or (name in _ALIKE and small_and_damaged)


def case_of(algorithm: str, fabric: Fabric) -> tuple[Case, Symmetry | None]:
    """Return the schedule that serves a fabric, built now or before, and the map that it is to be seen in.

    Raises:
        FabricError: the algorithm cannot work on the fabric.
    """
    first, symmetry = representative(without_repeats(fabric))
    kept = _built if fabric.n_servers <= MOST_SERVERS else _built_large
    return kept(find(algorithm)[0].name, first), symmetry


def _build(name: str, fabric: Fabric) -> Case:
    forest = find(name)[0].build(fabric)
    assert isinstance(forest, Forest)
    for column in (forest.root, forest.weight, forest.parent, forest.level, forest.stage):
        column.setflags(write=False)
    return Case(fabric, forest)


_built = lru_cache(maxsize=_KEPT)(_build)
_built_large = lru_cache(maxsize=_KEPT_LARGE)(_build)
