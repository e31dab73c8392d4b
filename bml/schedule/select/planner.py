"""From a fabric and the name of an algorithm to a plan."""

from __future__ import annotations

from bml.schedule.algorithms.registry import find
from bml.schedule.select.candidates import Candidates, usual_algorithm
from bml.schedule.select.model import DEFAULTS, Constants
from bml.schedule.select.plan import Plan
from bml.topology import Fabric, FabricError


def plan(
    fabric: Fabric, algorithm: str = "auto", nbytes: int | None = None, constants: Constants = DEFAULTS
) -> Plan:
    """Choose a schedule for the live servers of a fabric.

    `auto` takes the schedule of least modelled time for a vector of `nbytes` with these constants; if the
    size is not known, the one that suits large vectors.

    Raises:
        UsageError: there is no such algorithm.
        FabricError: no server is left, or the survivors fall into parts that cannot reach one another.
    """
    check_connected(fabric)
    if algorithm != "auto":
        find(algorithm)
        return Plan(fabric, algorithm, "asked for")
    if nbytes is None:
        return Plan(fabric, *usual_algorithm(fabric))
    candidates = Candidates(fabric, constants, patient=True)
    why = f"least modelled time for {nbytes} bytes"
    return Plan(fabric, candidates.best(nbytes).algorithm, why, tuple(candidates.prices(nbytes)))


def check_connected(fabric: Fabric) -> None:
    """Raise FabricError, which names the parts, unless all live servers can reach one another."""
    if fabric.is_connected:
        return
    if not fabric.servers:
        raise FabricError(f"no server of {fabric.name} is left: there is nothing to plan for")
    parts = "; ".join(_name_part(part) for part in fabric.components())
    raise FabricError(
        f"the live servers of {fabric} cannot all reach one another, they fall into parts: {parts}. "
        "Heal a link between them, or mark the servers of all parts but one as failed"
    )


def _name_part(part: tuple[int, ...]) -> str:
    shown = ", ".join(str(server) for server in part[:12])
    return f"server(s) {shown}" + (f" and {len(part) - 12} more" if len(part) > 12 else "")
