"""The list of algorithms: name, what may follow it after a colon, and the function that builds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bml.schedule.algorithms.detour import detour
from bml.schedule.algorithms.exchange import Exchange, exchange
from bml.schedule.algorithms.flextree import flextree
from bml.schedule.algorithms.hips import hips
from bml.schedule.algorithms.mesh import mesh
from bml.schedule.algorithms.ps import ps
from bml.schedule.algorithms.ring import ring
from bml.schedule.algorithms.tree import tree
from bml.schedule.ir.forest import Forest
from bml.schedule.packed.packing import packed
from bml.topology import BCube, Fabric, UsageError


@dataclass(frozen=True)
class Algorithm:
    """One way to make a schedule.

    Attributes:
        build: makes the schedule of a fabric; the text is what followed the colon, "" if nothing did.
        argument: what may follow the colon, as a pattern; "" if nothing may.
        example: how that is written.
    """

    build: Callable[[Fabric, str], Forest | Exchange]
    argument: str = ""
    example: str = ""


def _papers_way(fabric: Fabric, _: str) -> Forest:
    """BML, with detours where the fabric is damaged; off BCube that is HiPS over all dimensions."""
    return detour(fabric) if isinstance(fabric.wiring, BCube) else hips(fabric)


BUILDERS: Mapping[str, Algorithm] = MappingProxyType(
    {
        # On a healthy fabric the paper's schedule is BML; on a damaged one BML means the paper's schedule.
        "bml": Algorithm(_papers_way),
        "detour": Algorithm(_papers_way),
        "packed": Algorithm(lambda fabric, _: packed(fabric)),
        "hips": Algorithm(hips, "mesh|ring|ps", "hips:ring"),
        "ps": Algorithm(lambda fabric, shards: ps(fabric, int(shards or 1)), "[0-9]{1,6}", "ps:4"),
        "mesh": Algorithm(lambda fabric, _: mesh(fabric)),
        "ring": Algorithm(ring, "one|both", "ring:both"),
        "tree": Algorithm(lambda fabric, _: tree(fabric)),
        "flextree": Algorithm(flextree, "[0-9]{1,6}(x[0-9]{1,6})*", "flextree:3x3"),
        "exchange": Algorithm(lambda fabric, _: exchange(fabric)),
    }
)


def find(text: str) -> tuple[Algorithm, str]:
    """Read `mesh`, `ring:both` or `flextree:3x3`; return the algorithm and what follows the colon.

    Raises:
        UsageError: there is no such algorithm, or it cannot be followed by that.
    """
    name, colon, argument = text.partition(":")
    if name not in BUILDERS:
        raise UsageError(f"'{text}' is not an algorithm: choose one of auto, {', '.join(BUILDERS)}")
    algorithm = BUILDERS[name]
    if colon and not re.fullmatch(algorithm.argument or "(?!)", argument):
        how = f"write it like {name} or {algorithm.example}" if algorithm.argument else f"write {name} alone"
        raise UsageError(f"'{argument}' cannot follow the colon in '{text}': {how}")
    return algorithm, argument
