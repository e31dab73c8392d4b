"""A step of an algorithm on a fabric, in the setting of the papers: counted, and simulated."""

from __future__ import annotations

from bml.lab.flows.simulate import Conditions, simulate
from bml.schedule import plan
from bml.schedule.select.formulas import formula
from bml.topology import Fabric, UsageError

NBYTES = 57_500_000
"""Parameters of the papers' simulation, in bytes."""
RATE = 40e9 / 8
"""Their NICs, in bytes per second."""
DELAY_S = 1e-6
"""Their delay of a hop, in seconds."""
WHOLE_S = NBYTES / RATE
"""T, the time of these bytes over one NIC, in seconds."""


def counted(fabric: Fabric, algorithm: str) -> float:
    """Return the time of a step in T, counted in its schedule: the load of the busiest NIC.

    Raises:
        FabricError: the algorithm cannot work on the fabric.
        UsageError: the schedule is too large to be built.
    """
    return float(plan(fabric, algorithm).gst())


def simulated(fabric: Fabric, algorithm: str, delay_s: float = 0.0) -> float:
    """Return the time of a step in T, simulated with NBYTES, RATE and the slices of a job.

    Raises:
        FabricError, UsageError: as `counted`.
    """
    return simulate(plan(fabric, algorithm), Conditions(NBYTES, RATE, delay_s)).seconds / WHOLE_S


def by_formula(fabric: Fabric, algorithm: str) -> float:
    """Return the time of a step in T by the papers' formula.

    Raises:
        UsageError: no formula is known.
    """
    found = formula(fabric, algorithm)
    if found is None:
        raise UsageError(f"{algorithm} has no formula on {fabric}: choose mesh, ring, hips or bml")
    return float(found)
