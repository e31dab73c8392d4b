"""What a forest costs: bytes per NIC, and from them the synchronisation time in units of T = P/B.

All counts are integers in units of the forest's weights, so that times are exact fractions.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bml.schedule.forest import Forest, Phase
from topology import Fabric


@dataclass(frozen=True, eq=False)
class Load:
    """Traffic of every NIC in one synchronisation, both phases together.

    Attributes:
        sent: int64 [server, level], weight that the NIC sends; `sent / whole` is in units of P.
        received: int64 [server, level], likewise.
        whole: weight of all of P.
    """

    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    whole: int

    @property
    def busiest(self) -> Fraction:
        """Largest load of a NIC in one direction, in units of P."""
        return Fraction(int(max(self.sent.max(initial=0), self.received.max(initial=0))), self.whole)


def load(forest: Forest, fabric: Fabric) -> Load:
    """Count what every NIC sends and receives, relays included."""
    shape = (fabric.n_servers, fabric.levels)
    sent, received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for phase in Phase:
        for hops in forest.blocks(phase):
            weight = forest.weight[hops.piece]
            np.add.at(sent, (hops.sender, hops.level), weight)
            np.add.at(received, (hops.receiver, hops.level), weight)
    return Load(sent, received, forest.whole)


def gst(forest: Forest, fabric: Fabric) -> Fraction:
    """Pipelined synchronisation time in T: the load of the busiest NIC and direction.

    Slices follow one another and both phases overlap, so the busiest NIC never waits.
    """
    return load(forest, fabric).busiest


def gst_staged(forest: Forest, fabric: Fabric) -> Fraction:
    """Synchronisation time in T with a barrier after every stage: the sum of each stage's slowest NIC."""
    total = 0
    for phase in Phase:
        shape = (forest.n_stages(phase), fabric.n_servers, fabric.levels)
        sent, received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for hops in forest.blocks(phase):
            weight = forest.weight[hops.piece]
            np.add.at(sent, (hops.stage, hops.sender, hops.level), weight)
            np.add.at(received, (hops.stage, hops.receiver, hops.level), weight)
        total += int(np.maximum(sent, received).max(axis=(1, 2), initial=0).sum())
    return Fraction(total, forest.whole)
