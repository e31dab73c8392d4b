"""The papers' closed formulas for healthy fabrics: times in T without building anything, for any size.

n per level or dimension, h levels or dimensions, N servers. Where a schedule can be built it has exactly
these times (tests hold it to that); where it is too large to build, these are what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

from bml.topology import BCube, Fabric, Torus

_Formula = Callable[[int, int, int], Fraction]


def _flat(n: int, h: int, servers: int) -> Fraction:
    """2(N-1)/N: everything that one NIC must carry."""
    return Fraction(2 * (servers - 1), servers)


def _torus_mesh(n: int, h: int, servers: int) -> Fraction:
    """n/4 if n is even, (n^2-1)/(4n) if it is odd."""
    return Fraction(n, 4) if n % 2 == 0 else Fraction(n * n - 1, 4 * n)


def _alternating(n: int, h: int, servers: int) -> Fraction:
    """(N-1)/N where an alternating ring exists (n even, h > 1), else as one direction."""
    return _flat(n, h, servers) / (2 if n % 2 == 0 and h > 1 else 1)


_BCUBE: Mapping[str, _Formula] = MappingProxyType(
    {
        "mesh": lambda n, h, servers: Fraction(2 * (n - 1), n),
        "ring": _flat,
        "ring:both": _alternating,
        "hips": lambda n, h, servers: _flat(n, h, servers) / h,
    }
)
_TORUS: Mapping[str, _Formula] = MappingProxyType(
    {
        "mesh": _torus_mesh,
        "ring": lambda n, h, servers: _flat(n, h, servers) / 2,
        "ring:both": lambda n, h, servers: _flat(n, h, servers) / 2,
        "hips": lambda n, h, servers: _flat(n, h, servers) / (2 * h),
    }
)
_ONE_NIC: Mapping[str, _Formula] = MappingProxyType(
    {"mesh": _flat, "ring": _flat, "ring:both": _flat, "hips": _flat}
)


def formula(fabric: Fabric, algorithm: str) -> Fraction | None:
    """Pipelined time in T of an algorithm on the healthy, uniform fabric; None where no formula is known.

    Known are mesh, ring, ring:both, hips and bml (which is hips with what is best inside a group).
    """
    name = "hips" if algorithm == "bml" else algorithm
    match fabric.wiring:
        case BCube(n, h):
            found = _BCUBE.get(name)
        case Torus(n, h):
            found = _TORUS.get(name)
        case _:
            n, h, found = fabric.n_servers, 1, _ONE_NIC.get(name)
    return found(n, h, fabric.n_servers) if found else None


def dedicated_server(workers: int) -> Fraction:
    """Staged time in T of one parameter server beside N workers, each with one NIC: 2N."""
    return Fraction(2 * workers)
