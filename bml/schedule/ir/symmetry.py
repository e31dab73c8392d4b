"""A map of a wiring onto itself: a forest for one failure, seen through it, is one for a like failure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bml.schedule.ir.forest import Forest


@dataclass(frozen=True, eq=False)
class Symmetry:
    """A map of a healthy BCube onto itself.

    Attributes:
        server: int32 [server], server -> server.
        level: int8 [level], level -> level.
    """

    server: NDArray[np.int32]
    level: NDArray[np.int8]

    def apply(self, forest: Forest) -> Forest:
        """Return the forest as the map shows it; pieces, weights and stages keep their order.

        Its broadcast trees must be those of the reduce phase reversed.
        """
        assert forest.broadcast is None
        source = np.argsort(self.server)
        return replace(
            forest,
            root=self.server[forest.root],
            parent=self.shown(forest.parent.take(source, axis=1)),
            level=self.turned(forest.level.take(source, axis=1)),
            stage=forest.stage.take(source, axis=1),
            detours={
                (piece, int(self.server[child])): tuple(self._moved(hop) for hop in path)
                for (piece, child), path in forest.detours.items()
            },
        )

    def _moved(self, hop: tuple[int, int, int]) -> tuple[int, int, int]:
        sender, level, receiver = hop
        return int(self.server[sender]), int(self.level[level]), int(self.server[receiver])

    def shown(self, servers: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return what these servers are mapped to; AT_ROOT and NOT_THERE stay what they are."""
        # Negative entries index this tail.
        shown: NDArray[np.int32] = np.concatenate([self.server, np.array([-2, -1], np.int32)])[servers]
        return shown

    def turned(self, levels: NDArray[np.integer]) -> NDArray[np.int8]:
        """Return what these levels are mapped to; -1 stays what it is."""
        turned: NDArray[np.int8] = np.concatenate([self.level, np.array([-1], np.int8)])[levels]
        return turned

    def source(self, server: int) -> int:
        """Return the server that is mapped to this one."""
        return int(np.flatnonzero(self.server == server)[0])
