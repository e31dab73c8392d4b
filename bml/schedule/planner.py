"""From a fabric and the name of an algorithm to a plan: its forest, and every server's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from bml.schedule.detour import detour
from bml.schedule.forest import Forest
from bml.schedule.program import Program, compile_program, local_bml
from topology import Fabric, FabricError, UsageError

# On a healthy fabric the paper's schedule is BML; on a damaged one BML means the paper's schedule.
_BUILDERS: Mapping[str, Callable[[Fabric], Forest]] = MappingProxyType({"bml": detour, "detour": detour})
_PLANNED = ("ps", "mesh", "ring", "tree", "flextree", "hips", "packed", "exchange")

ALGORITHMS = ("auto", *_BUILDERS)
"""Names that `plan` takes."""


@dataclass(frozen=True)
class Plan:
    """A schedule for one fabric. The forest is built when first asked for and then kept.

    Attributes:
        fabric: what it is for, failures included.
        algorithm: the one that is used, never `auto`.
        why: reason for this algorithm, in words.
    """

    fabric: Fabric
    algorithm: str
    why: str

    @cached_property
    def forest(self) -> Forest:
        """All trees."""
        return _BUILDERS[self.algorithm](self.fabric)

    def program(self, server: int) -> Program:
        """Compile what one server does; on a healthy fabric without building the forest.

        Raises:
            UsageError: the server is dead or does not exist.
        """
        if not self.fabric.server_alive(server):
            raise UsageError(f"server {server} is not alive in {self.fabric}: it has no program")
        if not self.fabric.failures:
            return local_bml(self.fabric, server)
        return compile_program(self.forest, server)


def plan(fabric: Fabric, algorithm: str = "auto") -> Plan:
    """Choose a schedule for the live servers of a fabric.

    Raises:
        UsageError: there is no such algorithm, or it is not built yet.
        FabricError: no server is left, or the survivors fall into parts that cannot reach one another.
    """
    _check_connected(fabric)
    name, why = _choose(fabric, algorithm)
    return Plan(fabric, name, why)


def _choose(fabric: Fabric, algorithm: str) -> tuple[str, str]:
    """Return the algorithm to use and the reason."""
    if algorithm in _BUILDERS:
        return algorithm, "asked for"
    if algorithm != "auto":
        known = algorithm.partition(":")[0] in _PLANNED
        problem = "is not built yet" if known else "is not an algorithm"
        raise UsageError(f"'{algorithm}' {problem}: choose one of {', '.join(ALGORITHMS)}")
    if fabric.failures:
        return "detour", "the fabric is damaged: detours round the damage"
    return "bml", "the fabric is healthy: all levels work at once"


def _check_connected(fabric: Fabric) -> None:
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
