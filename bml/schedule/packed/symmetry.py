"""One plan for all failures that look alike: BCube's symmetries carry a plan from one to the other.

Adding a constant to every digit (mod n) and rotating the levels map a healthy BCube onto itself, and any
server onto any other, any link onto any other, any switch onto any other. So three plans serve all single
failures, and every server that plans alone gets the same forest, whether it had planned before or not.
"""

from __future__ import annotations

import numpy as np

from bml.schedule.ir.symmetry import Symmetry
from bml.topology import BCube, Fabric, Failure, LinkFailure, ServerFailure, SwitchFailure


def without_repeats(fabric: Fabric) -> Fabric:
    """Drop failures that others imply: links of dead servers and of dead switches."""
    failures = fabric.failures
    kept = frozenset(
        failure
        for failure in failures
        if not isinstance(failure, LinkFailure)
        or (
            ServerFailure(failure.server) not in failures
            and SwitchFailure(failure.level, fabric.group(failure.server, failure.level)) not in failures
        )
    )
    return fabric if len(kept) == len(failures) else Fabric(fabric.wiring, kept, fabric.rates)


def representative(fabric: Fabric) -> tuple[Fabric, Symmetry | None]:
    """Return the fabric whose plan serves for this one, and the map from it; None if it is this one."""
    if not isinstance(fabric.wiring, BCube) or fabric.rates or len(fabric.failures) != 1:
        return fabric, None
    (failure,) = fabric.failures
    first, shift, turn = _first_alike(fabric.wiring, failure)
    if failure == first:
        return fabric, None
    return Fabric(fabric.wiring, frozenset([first])), _symmetry(fabric.wiring, shift, turn)


def _first_alike(cube: BCube, failure: Failure) -> tuple[Failure, int, int]:
    """Return the failure of this kind at server 0 and level 0, and where it is to be moved and turned."""
    match failure:
        case ServerFailure(server):
            return ServerFailure(0), server, 0
        case LinkFailure(server, level):
            return LinkFailure(0, 0), server, level
        case SwitchFailure(level, group):
            return SwitchFailure(0, 0), cube.members(level, group)[0], level


def _symmetry(cube: BCube, shift: int, turn: int) -> Symmetry:
    """Digit i becomes digit i + turn (mod k); then the digits of `shift` are added (mod n)."""
    servers = np.arange(cube.n_servers)
    image = np.zeros(cube.n_servers, np.int32)
    levels = np.array([(level + turn) % cube.levels for level in range(cube.levels)], np.int8)
    for level, target in enumerate(levels.tolist()):
        digit = servers // cube.ports**level + shift // cube.ports**target
        image += (digit % cube.ports * cube.ports**target).astype(np.int32)
    return Symmetry(image, levels)
