"""Slow NICs of a damaged fabric that is too large for trees to be packed round them while a step waits."""

from __future__ import annotations

from bml.schedule.select.candidates import usual_algorithm
from bml.schedule.select.plan import Plan
from bml.topology import Fabric, LinkFailure


def without_slow_nics(fabric: Fabric) -> Fabric:
    """Return the fabric on which a step takes the least time: this one, or the same without its slow NICs.

    On this one there are detours, which know dead links, but no rates. On the other one a BCube is packed.

    Raises:
        FabricError: two survivors are no longer joined by any live path.
        UsageError: the forest would be too large to be built.
    """
    around = fabric.without(*(LinkFailure(*link) for link, rate in fabric.rates if rate < 1))
    if around == fabric or not around.is_connected:
        return fabric
    return min(fabric, around, key=lambda each: Plan(each, *usual_algorithm(each, patient=False)).gst())
