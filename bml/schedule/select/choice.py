"""Chooses the schedule of each step of a running job: decided by the damage, and by the size of the step.

All servers of a view know the same fabric, algorithm and constants, and a step has one size, so all choose
alike without a message. What is not needed is never built.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

from bml.schedule.algorithms.direct import DirectProgram
from bml.schedule.algorithms.exchange import works_on
from bml.schedule.select.model import DEFAULTS, Constants, switch_over
from bml.schedule.select.planner import AnyProgram, Plan, plan
from bml.topology import Fabric

_MOST_PACKED = 64
"""Servers of a fabric up to which damage is answered by packed trees. Packing has a bounded effort, but its
bound grows with the fabric, and the step waits for it; detours are found in milliseconds."""


class Schedules:
    """The schedules of one fabric, as damaged as it is, between which the size of a step decides.

    `algorithm` is one of ALGORITHMS; one that cannot work here is replaced by `auto`. `auto` takes `exchange`
    below `switch_over_nbytes`, else what suits large vectors.
    """

    def __init__(self, fabric: Fabric, algorithm: str = "auto", constants: Constants = DEFAULTS):
        self.fabric = fabric
        self.algorithm = algorithm
        self._constants = constants

    def for_nbytes(self, nbytes: int) -> Plan:
        """Return the plan for a step of so many bytes.

        Raises:
            FabricError: the survivors cannot reach one another.
        """
        if self.small is not None and nbytes < self.switch_over_nbytes:
            return self.small
        return self.large

    @cached_property
    def large(self) -> Plan:
        """The schedule that suits large vectors, or the one that was asked for."""
        too_large = bool(self.fabric.failures) and self.fabric.n_servers > _MOST_PACKED
        wanted = "detour" if self.algorithm == "auto" and too_large else self.algorithm
        return plan(self.fabric, wanted, or_auto=True)

    @cached_property
    def small(self) -> Plan | None:
        """The exchange of whole vectors; None where it cannot work, or was not left to us."""
        if self.algorithm != "auto" or not works_on(self.fabric):
            return None
        return Plan(self.fabric, "exchange", "small: start-up times rule")

    @cached_property
    def switch_over_nbytes(self) -> float:
        """Steps of fewer bytes take `small`; 0 if none does."""
        if self.small is None:
            return 0.0
        return switch_over(self.small.counts(), self.large.counts(), self._constants)


class Programs:
    """The programs of one server in one view, by the size of the step; compiled on demand, then kept."""

    def __init__(self, schedules: Schedules, server: int):
        self._schedules = schedules
        self._server = server
        self._compiled: dict[str, AnyProgram] = {}
        self.direct: DirectProgram | None = None

    def for_nbytes(self, nbytes: int) -> AnyProgram:
        """Return the program of a step of so many bytes; see `Schedules.for_nbytes`."""
        made = self._schedules.for_nbytes(nbytes)
        if made.algorithm not in self._compiled:
            self._compiled[made.algorithm] = made.program(self._server)
        return self._compiled[made.algorithm]


class OneProgram:
    """The same program for steps of every size: where memory is shared there is nothing to choose."""

    def __init__(self, program: DirectProgram):
        self.direct: DirectProgram | None = program
        self._program = program

    def for_nbytes(self, nbytes: int) -> DirectProgram:
        """Return the program."""
        return self._program


AnyPrograms: TypeAlias = Programs | OneProgram
"""The programs of one server in one view."""
