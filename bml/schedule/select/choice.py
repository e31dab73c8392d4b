"""Chooses the schedule of each step of a running job: decided by the damage, and by the size of the step.

All servers of a view know the same fabric, algorithm and constants, and a step has one size, so all choose
alike without a message. What is not needed is never built.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

from bml.schedule.algorithms.direct import DirectProgram
from bml.schedule.select.candidates import Candidates
from bml.schedule.select.cases import MOST_SERVERS
from bml.schedule.select.large import without_slow_nics
from bml.schedule.select.model import DEFAULTS, Constants
from bml.schedule.select.plan import AnyProgram, Plan
from bml.schedule.select.planner import check_connected, plan
from bml.topology import BCube, Fabric, FabricError, UsageError


class Schedules:
    """The schedules of one fabric, as damaged as it is, between which the size of a step decides.

    `algorithm` is one of ALGORITHMS; one that cannot work here is replaced by `auto`.
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
        return self._asked or self._candidates.best(nbytes)

    def plan_all(self) -> None:
        """Plan for all sizes. Raises FabricError as `for_nbytes`."""
        if self._asked is None:
            self._candidates.plan_all()

    @cached_property
    def _asked(self) -> Plan | None:
        """The plan that was asked for; None if the choice is ours, as it is where that one cannot work."""
        if self.algorithm == "auto":
            return None
        made = plan(self.fabric, self.algorithm)
        try:
            made.build()
        except (FabricError, UsageError):
            return None
        return made

    @cached_property
    def _candidates(self) -> Candidates:
        check_connected(self.fabric)
        return Candidates(self._around or self.fabric, self._constants)

    @property
    def _around(self) -> Fabric | None:
        """What is planned for, where a large fabric is damaged and slow; else None."""
        large = self.fabric.n_servers > MOST_SERVERS
        return (
            without_slow_nics(self.fabric) if large and self.fabric.failures and self.fabric.rates else None
        )


def prepare(fabric: Fabric, algorithm: str, constants: Constants) -> int:
    """Plan for every single failure of a healthy BCube ahead; return how many plans that took.

    Nothing is done on fabrics of more than `MOST_SERVERS` servers, which plan when it is needed.
    """
    cube = isinstance(fabric.wiring, BCube) and not fabric.failures and not fabric.rates
    if not cube or fabric.n_servers > MOST_SERVERS:
        return 0
    damaged = [fabric.without(failure) for failure in ("server:0", "link:0/0", "switch:0/0")]
    survivable = [one for one in damaged if one.is_connected]
    for one in survivable:
        Schedules(one, algorithm, constants).plan_all()
    return len(survivable)


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
