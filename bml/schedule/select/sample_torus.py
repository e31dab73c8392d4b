"""HiPS on a healthy torus that is too large to be written down: exact loads from a few trees, and a sample.

A torus of even size looks the same from every server whose coordinates have the same parities (the cables of
a ring are coloured in turn). So the trees of one root of each parity say what every NIC carries.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bml.schedule.algorithms.hips import hips
from bml.schedule.ir.cost import Load
from bml.schedule.ir.forest import Forest, Phase
from bml.topology import Fabric, Torus

_LEAST_SIZE = 4
"""In rings of two, both cables lead to the same server."""


def is_even_torus(fabric: Fabric) -> bool:
    """Whether it is a healthy torus of even size whose links are alike."""
    wiring = fabric.wiring
    whole = not fabric.failures and not fabric.rates
    return isinstance(wiring, Torus) and whole and wiring.size % 2 == 0 and wiring.size >= _LEAST_SIZE


def load_of_torus(fabric: Fabric) -> Load:
    """Traffic of every NIC in HiPS with rings inside, equal to that of its forest."""
    forest, parity = _of_all_parities(fabric)
    sent, received = np.zeros((2, parity.max() + 1, fabric.levels), np.int64)
    for phase in Phase:
        for hops in forest.blocks(phase):
            np.add.at(sent, (parity[hops.sender], hops.level), 1)
            np.add.at(received, (parity[hops.receiver], hops.level), 1)
    return Load(sent[parity], received[parity], fabric.levels * fabric.n_servers)


def staged_of_torus(fabric: Fabric) -> Fraction:
    """Its synchronisation time in T with a barrier after every stage."""
    forest, parity = _of_all_parities(fabric)
    total = 0
    for phase in Phase:
        shape = (2, forest.n_stages(phase), parity.max() + 1, fabric.levels)
        sent, received = np.zeros(shape, np.int64)
        for hops in forest.blocks(phase):
            np.add.at(sent, (hops.stage, parity[hops.sender], hops.level), 1)
            np.add.at(received, (hops.stage, parity[hops.receiver], hops.level), 1)
        total += int(np.maximum(sent, received).max(axis=(1, 2)).sum())
    return Fraction(total, fabric.levels * fabric.n_servers)


def sample_of_torus(fabric: Fabric, count: int) -> Forest:
    """About `count` trees, of roots that are evenly spread over the servers."""
    roots = np.linspace(0, fabric.n_servers - 1, max(1, count // fabric.levels)).astype(np.int64)
    return hips(fabric, roots=np.unique(roots).tolist())


def _of_all_parities(fabric: Fabric) -> tuple[Forest, NDArray[np.int64]]:
    """The trees of one root of each parity, and the parity of every server, as a number."""
    wiring = fabric.wiring
    assert isinstance(wiring, Torus)
    places = np.arange(wiring.dimensions)
    coordinates = np.arange(fabric.n_servers)[:, None] // wiring.size**places % wiring.size
    parity = (coordinates % 2) @ 2**places
    roots = [int(np.flatnonzero(parity == each)[0]) for each in range(2**wiring.dimensions)]
    return hips(fabric, roots=roots), parity
