"""Detours: the shortest live paths between two servers whose direct hop is broken or never was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

from bml.topology import Fabric, FabricError

Path: TypeAlias = tuple[tuple[int, int, int], ...]
"""Hops (from server, level, to server) in the order of travel."""

MAX_CHOICES = 256
"""Shortest paths looked at per pair of servers: enough to balance over, bounded under heavy damage."""


def shortest_paths(fabric: Fabric, source: int, target: int) -> tuple[Path, ...]:
    """Return shortest live paths from source to target, at most MAX_CHOICES, in a fixed order.

    Raises:
        FabricError: no live path joins the two.
    """
    last_hops = _last_hops(fabric, source, target)
    if target not in last_hops or not fabric.server_alive(source):
        raise FabricError(
            f"no live path joins servers {source} and {target} of {fabric}: heal a link between them or "
            "go on with one part only"
        )
    return tuple(sorted(islice(_paths(last_hops, target), MAX_CHOICES)))


def _last_hops(fabric: Fabric, source: int, target: int) -> dict[int, list[tuple[int, int]]]:
    """Return of each server that is found from the source the (server, level) before it on shortest paths.

    The source has none. Servers that are farther away than the target are not looked for.
    """
    found: dict[int, list[tuple[int, int]]] = {source: []}
    border: Sequence[int] = [source]
    while border and target not in found:
        next_to: dict[int, list[tuple[int, int]]] = {}
        for server in border:
            for level in range(fabric.levels):
                for other in fabric.neighbours(server, level):
                    if other not in found:
                        next_to.setdefault(other, []).append((server, level))
        found |= next_to
        border = list(next_to)
    return found


def _paths(last_hops: dict[int, list[tuple[int, int]]], target: int) -> Iterator[Path]:
    """Yield the shortest paths to a server, one after the other."""
    begun: list[tuple[int, Path]] = [(target, ())]  # no recursion: a ring may have a thousand hops
    while begun:
        server, rest = begun.pop()
        if not last_hops[server]:
            yield rest
        for before, level in reversed(last_hops[server]):
            begun.append((before, ((before, level, server), *rest)))
