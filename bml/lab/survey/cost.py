"""What one set of failures costs: whether the survivors still reach one another, and their time."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from bml.schedule import plan, prove
from bml.topology import Fabric, Failure, LinkFailure, ServerFailure, SwitchFailure


@dataclass(frozen=True)
class Cost:
    """What a fabric with these failures can do.

    Attributes:
        survivors: live servers.
        largest: live servers of the largest part of the fabric; fewer than `survivors` if it falls apart.
        gst: synchronisation time of the survivors, in units of T = P/B; None if the fabric falls apart.
        bound: the proved least time, None likewise.
    """

    survivors: int
    largest: int
    gst: Fraction | None
    bound: Fraction | None

    @property
    def over_bound(self) -> Fraction:
        """The time in units of the proved least one; 1 for a server alone. Only where there is a time."""
        assert self.gst is not None
        assert self.bound is not None
        return self.gst / self.bound if self.bound else Fraction(1)


def cost_of(fabric: Fabric, failures: frozenset[Failure], algorithm: str) -> Cost:
    """Plan for the survivors of these failures.

    Raises:
        FabricError: the survivors reach one another, but this algorithm cannot work there.
    """
    damaged = fabric.without(*failures)
    survivors = len(damaged.servers)
    if not damaged.is_connected:
        parts = damaged.components()
        return Cost(survivors, len(parts[0]) if parts else 0, None, None)
    return Cost(survivors, survivors, plan(damaged, algorithm).gst(), prove(damaged).value)


def needed(fabric: Fabric, failures: frozenset[Failure]) -> frozenset[Failure]:
    """Leave out links that are dead already as their server or their switch is."""
    return frozenset(
        failure
        for failure in failures
        if not (
            isinstance(failure, LinkFailure)
            and (
                ServerFailure(failure.server) in failures
                or SwitchFailure(failure.level, fabric.group(failure.server, failure.level)) in failures
            )
        )
    )
