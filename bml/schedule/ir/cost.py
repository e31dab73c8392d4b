"""The cost of a forest: bytes per NIC, and from them the synchronisation time in units of T = P/B.

All counts are integers in units of the forest's weights, so that times are exact fractions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bml.schedule.ir.forest import Forest, Phase
from bml.topology import Fabric, FatTree, InnerLink


@dataclass(frozen=True, eq=False)
class Load:
    """Traffic of every NIC in one synchronisation, both phases together.

    Attributes:
        sent: int64 [server, level], weight that the NIC sends; `sent / whole` is in units of P.
        received: int64 [server, level], likewise.
        whole: weight of all of P.
        inner: weight on each direction of each inner link, where servers see a network as one switch.
    """

    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    whole: int
    inner: Mapping[InnerLink, int] = field(default_factory=dict)

    @property
    def busiest(self) -> Fraction:
        """Largest load of a NIC in one direction, in units of P."""
        return Fraction(int(max(self.sent.max(initial=0), self.received.max(initial=0))), self.whole)

    @property
    def hottest_inner(self) -> Fraction:
        """Largest load of an inner link in one direction, in units of P; 0 if there are none."""
        return Fraction(max(self.inner.values(), default=0), self.whole)


def load(forest: Forest, fabric: Fabric) -> Load:
    """Count what every NIC, and every inner link of a Fat-Tree, sends and receives, relays included."""
    shape = (fabric.n_servers, fabric.levels)
    inside = isinstance(fabric.wiring, FatTree)
    if not (forest.detours or forest.broadcast or inside):
        # Each edge is one hop, there and back: both its NICs send and receive the piece once.
        used = forest.edges_per_nic(fabric.levels)
        return Load(used, used, forest.whole)
    sent, received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    pairs = np.zeros((fabric.n_servers, fabric.n_servers) if inside else (0, 0), np.int64)
    for phase in Phase:
        for hops in forest.blocks(phase):
            weight = forest.weight[hops.piece]
            np.add.at(sent, (hops.sender, hops.level), weight)
            np.add.at(received, (hops.receiver, hops.level), weight)
            if inside:
                np.add.at(pairs, (hops.sender, hops.receiver), weight)
    return Load(sent, received, forest.whole, _inner(pairs, fabric))


def gst(forest: Forest, fabric: Fabric) -> Fraction:
    """Pipelined synchronisation time in T: the time of the busiest NIC and direction at its link's rate.

    Slices follow one another and both phases overlap, so the busiest NIC never waits. The inside of a
    Fat-Tree is taken not to block; `Load.hottest_inner` says where ECMP makes it worse.
    """
    counts = load(forest, fabric)
    return slowest(np.maximum(counts.sent, counts.received), fabric) / counts.whole


def gst_staged(forest: Forest, fabric: Fabric) -> Fraction:
    """Synchronisation time in T with a barrier after every stage: the sum of each stage's slowest NIC."""
    total = Fraction(0)
    for phase in Phase:
        shape = (forest.n_stages(phase), fabric.n_servers, fabric.levels)
        sent, received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for hops in forest.blocks(phase):
            weight = forest.weight[hops.piece]
            np.add.at(sent, (hops.stage, hops.sender, hops.level), weight)
            np.add.at(received, (hops.stage, hops.receiver, hops.level), weight)
        total += sum((slowest(each, fabric) for each in np.maximum(sent, received)), Fraction(0))
    return total / forest.whole


def slowest(weights: NDArray[np.int64], fabric: Fabric) -> Fraction:
    """The longest time that a NIC takes for its weight, int64 [server, level], at its link's rate.

    Exact for rates of any number of digits: their common multiple would not fit into 64 bits.
    """
    normal, longest = weights.copy(), Fraction(0)
    for link, rate in fabric.rates:
        normal[link] = 0
        longest = max(longest, int(weights[link]) / rate)
    return max(longest, Fraction(int(normal.max(initial=0))))


def _inner(pairs: NDArray[np.int64], fabric: Fabric) -> dict[InnerLink, int]:
    """Spread the traffic of every pair of servers over the inner links that its flow takes."""
    found: Counter[InnerLink] = Counter()
    for sender, receiver in np.argwhere(pairs).tolist():
        for link in fabric.inner_path(sender, receiver):
            found[link] += int(pairs[sender, receiver])
    return dict(found)
