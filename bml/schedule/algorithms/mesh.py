"""Mesh: every server owns one part of the vector, and all send to all.

On a fabric whose servers forward, traffic between servers that are no neighbours goes through relays.
Times: 2(N-1)/N·T on one switch, 2(n-1)/n·T on BCube, on a torus n/4·T (n even) or (n^2-1)/(4n)·T (odd).
"""

from __future__ import annotations

from bml.schedule.algorithms.ps import star
from bml.schedule.algorithms.registry import algorithm
from bml.schedule.ir.forest import Forest
from bml.topology import Fabric, Torus


@algorithm(
    "mesh",
    does="every server owns 1/N of the vector and all send to all; relays where there is no direct hop",
    damaged="survivors only, detours",
)
def mesh(fabric: Fabric) -> Forest:
    """Build a parameter server sharded over all live servers.

    Half way round an even ring of a torus both ways are equally long: each owner has two pieces there,
    and one goes each way.
    """
    wiring = fabric.wiring
    ties = isinstance(wiring, Torus) and wiring.size % 2 == 0
    return star(fabric, fabric.servers, turns=2 if ties else 1)
