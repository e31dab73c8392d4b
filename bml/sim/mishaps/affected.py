"""The servers that mishaps befell: they may be lost for it, and no others may."""

from __future__ import annotations

from itertools import product

from bml.sim.world.paths import Pair
from bml.topology import Fabric, LinkFailure, ServerFailure, Switch


class Affected:
    """The servers of `fabric` that mishaps befell in one run; a view needs `least` of all."""

    def __init__(self, fabric: Fabric, least: int):
        self.servers: set[int] = set()
        """Servers that a mishap befell as a whole."""
        self.pairs: set[Pair] = set()
        """Neighbours between which something did not get through: a NIC of one of them may be given up."""
        self.n_network = 0
        """Mishaps of the network. From two on, the evidence may have several explanations, and the right one
        need not be found: a whole server may be blamed."""
        self.slow: set[Switch] = set()
        """Switches of which a port, or the switch itself, was slow: only their NICs may be planned slow."""
        self.resized = False
        """Whether servers left for good, or joined."""
        self._fabric = fabric
        self._least = least

    def unaffected(self) -> tuple[int, ...]:
        """Servers that nothing befell and that are enough together, whichever NIC of a pair is given up."""
        dead = [ServerFailure(server) for server in self.servers]
        found = {*self._fabric.servers}
        for nics in product(*([LinkFailure(a, lv), LinkFailure(b, lv)] for a, b, lv in self.pairs)):
            parts = self._fabric.without(*dead, *nics).components()
            found.intersection_update(parts[0] if parts and len(parts[0]) >= self._least else ())
        return tuple(sorted(found))
