"""Detours on a fabric too large to be packed while a step waits: they know dead links, but no rates."""

from __future__ import annotations

from bml.schedule.select.plan import Plan
from bml.topology import Fabric, LinkFailure


def fabric_for_detours(fabric: Fabric) -> Fabric:
    """Return the fabric for which detours take the least time: this one, or the same without its slow NICs.

    Raises:
        FabricError: two survivors are no longer joined by any live path.
        UsageError: the forest would be too large to be built.
    """
    around = fabric.without(*(LinkFailure(*link) for link, rate in fabric.rates if rate < 1))
    if around == fabric or not around.is_connected:
        return fabric
    return min(fabric, around, key=lambda each: Plan(each, "detour", "").gst())
