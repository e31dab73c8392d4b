"""BML on a healthy BCube, where all servers do the same: drawn from one server, without a forest.

Server s sends, in stage j of thread p, over level l = (p + j) mod k to its neighbours there: the sums of
n^(k-1-j) pieces to each in the reduce phase, as many results in the broadcast phase, which goes through the
stages backwards. What it sends waits for all that the stages before brought it.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from bml.lab.flows.traffic import Column, Traffic, check_size
from bml.topology import BCube


def of_bml(wiring: BCube, n_slices: int, whole: bool) -> Traffic:
    """Return what all servers send for each slice, or, unless `whole`, one server that stands for all.

    Where all NICs are alike, at all times, a server receives when it sends: what server 0 sends to a peer
    comes to it from another one in the same moments. So its transfers lead back to itself (`wire`, folded).

    Raises:
        UsageError: `n_slices` times that would not fit into memory.
    """
    n, k = wiring.ports, wiring.levels
    servers = wiring.n_servers if whole else 1
    per_server = 2 * k * k * (n - 1) + k * (2 * k + 1)
    check_size(servers * per_server * n_slices, f"bml on {wiring.name}")
    return _Drawing(n, k, servers).draw()


class _Drawing:
    """The nodes of server s are s·m .. s·m + m - 1: transfers, and a meeting after each stage of a thread."""

    def __init__(self, n: int, k: int, servers: int) -> None:
        self._n, self._k, self._servers = n, k, servers
        self._total = n**k
        self._everyone = np.arange(servers, dtype=np.int32)
        self._rows: list[tuple[Column, int, Column, float, int]] = []
        self._arrows: list[tuple[int, NDArray[np.int32], int]] = []

    def draw(self) -> Traffic:
        """Draw all threads."""
        for thread in range(self._k):
            self._thread(thread)
        size = len(self._rows)
        offset = self._everyone * size
        sender = np.stack([row[0] for row in self._rows], axis=1).ravel()
        receiver = np.stack([row[2] for row in self._rows], axis=1).ravel()
        level, share, priority = (
            np.tile(np.array([row[i] for row in self._rows], kind), self._servers)
            for i, kind in ((1, np.int32), (3, np.float64), (4, np.int32))
        )
        before = np.concatenate([offset + node for node, _, _ in self._arrows])
        after = np.concatenate([target * size + node for _, target, node in self._arrows])
        return Traffic(
            sender, level, receiver, share, priority, before.astype(np.int32), after.astype(np.int32)
        )

    def _thread(self, thread: int) -> None:
        """Reduce from stage 0 to k-1, meet as the root of one piece, broadcast from stage k-1 to 0."""
        n, k = self._n, self._k
        met: int | None = None
        for phase, stage in [*product((1,), range(k)), *product((0,), reversed(range(k)))]:
            level = (thread + stage) % k
            share = n ** (k - 1 - stage) / (k * self._total)
            gathered = self._meeting()
            if met is not None:
                self._arrows.append((met, self._everyone, gathered))
            for distance in range(1, n):
                peer = self._moved(level, distance)
                to = peer if self._servers > 1 else self._everyone
                node = self._add(self._everyone, level, peer, share, phase)
                if met is not None:
                    self._arrows.append((met, self._everyone, node))
                self._arrows.append((node, to, gathered))
            met = gathered

    def _moved(self, level: int, distance: int) -> Column:
        """The neighbour of every server whose digit at the level is so much more, round the base."""
        low = self._n**level
        digit = self._everyone // low % self._n
        moved: Column = self._everyone + ((digit + distance) % self._n - digit) * low
        return moved.astype(np.int32)

    def _meeting(self) -> int:
        nowhere = np.full(self._servers, -1, np.int32)
        return self._add(nowhere, -1, nowhere, 0.0, 0)

    def _add(self, sender: Column, level: int, receiver: Column, share: float, priority: int) -> int:
        self._rows.append((sender, level, receiver, share, priority))
        return len(self._rows) - 1
