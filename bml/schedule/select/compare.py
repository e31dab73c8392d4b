"""The same question to many algorithms on many fabrics: which time, and if none, why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from bml.schedule.select.formulas import formula
from bml.schedule.select.planner import plan
from bml.topology import Fabric, FabricError, Graph, UsageError

LARGEST_BUILT = 64
"""Servers up to which schedules are built to be priced; beyond that a formula is taken where there is one."""

PAPERS = ("mesh", "ring", "ring:both", "hips")
"""Algorithms of the papers' table for healthy fabrics."""


@dataclass(frozen=True)
class Cell:
    """One entry of the table.

    Attributes:
        fabric: the fabric, in its notation, with its failures.
        algorithm: its name.
        gst: pipelined time in T; None where there is none.
        gst_staged: time in T with a barrier after every stage; None where only a formula is known.
        how: "built" and verified, by "formula", or "impossible".
        why: the reason if it is impossible.
    """

    fabric: str
    algorithm: str
    gst: Fraction | None
    gst_staged: Fraction | None
    how: str
    why: str = ""


def compare(fabrics: Iterable[Fabric], algorithms: Iterable[str]) -> Iterator[Cell]:
    """Price every algorithm on every fabric, in this order.

    Raises:
        UsageError: there is no such algorithm.
    """
    names = list(algorithms)
    for fabric in fabrics:
        for name in names:
            yield price(fabric, name)


def price(fabric: Fabric, algorithm: str) -> Cell:
    """Build, verify and price one schedule, or take its formula if the fabric is too large to build it."""
    known = None if fabric.failures or fabric.rates else formula(fabric, algorithm)
    if len(fabric.servers) > LARGEST_BUILT and known is not None:
        return Cell(str(fabric), algorithm, known, None, "formula")
    made = plan(fabric, algorithm)
    try:
        problems = made.violations()
    except (FabricError, UsageError) as error:
        return Cell(str(fabric), algorithm, None, None, "impossible", str(error))
    if problems:
        return Cell(str(fabric), algorithm, None, None, "impossible", problems[0])
    return Cell(str(fabric), algorithm, made.gst(), made.gst_staged(), "built")


def single_failures(fabric: Fabric) -> list[Fabric]:
    """Return the fabric, and it without its first server, its first link and its first switch.

    A graph may fall apart without one of them: that is left out.
    """
    (server, level), (switch_level, group) = fabric.links[0], fabric.switches[0]
    parts = (f"server:{server}", f"link:{server}/{level}", f"switch:{switch_level}/{group}")
    damaged = [fabric.without(part) for part in parts]
    if isinstance(fabric.wiring, Graph):
        damaged = [each for each in damaged if each.is_connected]
    return [fabric, *damaged]
