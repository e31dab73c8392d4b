"""Finds the NICs of a damaged fabric that are alike: a symmetry of what is left maps them onto one another.

Candidates are the symmetries of the wiring that are easy to name (two values of a digit change places, two
levels do, a ring is turned or reflected). A candidate counts only if it maps what is alive, with its rates,
onto itself; that is checked NIC by NIC. Missing some symmetries only makes the linear programme larger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from bml.schedule.ir.nics import Nics
from bml.topology import BCube, Torus

_Map = NDArray[np.int64]
"""Server -> server."""
_Images = list[int]
"""NIC -> NIC."""


def alike(nics: Nics) -> list[int]:
    """Number the classes of NICs that are alike: NIC -> class."""
    top = list(range(len(nics.owner)))
    check = _Check(nics)
    for images in _symmetries(nics, check):
        for nic, image in enumerate(images):
            a, b = _find(top, nic), _find(top, image)
            top[max(a, b)] = min(a, b)
    tops = [_find(top, nic) for nic in range(len(top))]
    number = {first: count for count, first in enumerate(dict.fromkeys(tops))}
    return [number[first] for first in tops]


def _find(top: list[int], nic: int) -> int:
    while top[nic] != nic:
        top[nic] = top[top[nic]]
        nic = top[nic]
    return nic


class _Check:
    """Whether a map of servers keeps all live groups and rates, and where it takes each NIC."""

    def __init__(self, nics: Nics) -> None:
        self._place = {server: at for at, server in enumerate(nics.servers)}
        self._nics = nics
        self._groups = defaultdict(list)
        for group, members in enumerate(nics.members):
            self._groups[tuple(sorted(nics.owner[nic] for nic in members))].append(group)

    def images(self, server: _Map) -> _Images | None:
        """Return where each NIC goes; None if the map is no symmetry of what is left."""
        nics = self._nics
        to = [self._place.get(image, -1) for image in server[list(nics.servers)].tolist()]
        if -1 in to:
            return None
        images = [-1] * len(nics.owner)
        for owners, groups in self._groups.items():
            targets = self._groups.get(tuple(sorted(to[owner] for owner in owners)), [])
            # Several cables between the same servers go to as many others, in order.
            if len(targets) != len(groups):
                return None
            for group, target in zip(groups, targets, strict=True):
                at = {nics.owner[nic]: nic for nic in nics.members[target]}
                for nic in nics.members[group]:
                    images[nic] = at[to[nics.owner[nic]]]
        return images if all(nics.rate[a] == nics.rate[b] for a, b in enumerate(images)) else None


def _symmetries(nics: Nics, check: _Check) -> Iterator[_Images]:
    wiring = nics.fabric.wiring
    if isinstance(wiring, Torus):
        for candidate in _torus_maps(wiring):
            if (images := check.images(candidate)) is not None:
                yield images
        return
    if isinstance(wiring, BCube):
        for a, b in combinations(range(wiring.levels), 2):
            if (images := check.images(_swap_levels(wiring, a, b))) is not None:
                yield images
        sizes = [wiring.ports] * wiring.levels
    else:
        # Servers see one switch: they are all its digit.
        sizes = [wiring.n_servers]
    for level, size in enumerate(sizes):
        yield from _equal_digits(check, sizes[0] ** level, size, wiring.n_servers)


def _equal_digits(check: _Check, low: int, size: int, n_servers: int) -> Iterator[_Images]:
    """Swaps of two values of a digit that change nothing, one for each value but the first of its kind."""
    servers = np.arange(n_servers)
    digit = servers // low % size
    firsts: list[int] = []
    for value in range(size):
        for first in firsts:
            swapped = np.where(digit == value, first, np.where(digit == first, value, digit))
            images = check.images(servers + (swapped - digit) * low)
            if images is not None:
                yield images
                break
        else:
            firsts.append(value)


def _swap_levels(cube: BCube, a: int, b: int) -> _Map:
    servers = np.arange(cube.n_servers)
    low_a, low_b = cube.ports**a, cube.ports**b
    at_a, at_b = servers // low_a % cube.ports, servers // low_b % cube.ports
    return np.asarray(servers + (at_b - at_a) * low_a + (at_a - at_b) * low_b)


def _torus_maps(wiring: Torus) -> Iterator[_Map]:
    """Turns and reflections of every dimension, and dimensions that change places."""
    servers = np.arange(wiring.n_servers)
    size = wiring.size
    lows = [size**dimension for dimension in range(wiring.dimensions)]
    at = [servers // low % size for low in lows]
    for low, x in zip(lows, at, strict=True):
        yield servers + ((x + 1) % size - x) * low
        for centre in range(size):
            yield servers + ((centre - x) % size - x) * low
    for a, b in combinations(range(wiring.dimensions), 2):
        yield servers + (at[b] - at[a]) * lows[a] + (at[a] - at[b]) * lows[b]
