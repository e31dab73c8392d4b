"""What a schedule sends: transfers between neighbours, and which of them wait for which.

A node is a transfer of some servers' sum or result over one hop, or a meeting: "all parts of this sum are
here", which takes no time. A vector is cut as jobs cut it: all pieces into as many slices, of which the first
ones go first, and of one slice results before partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bml.schedule import Exchange, Forest, Phase
from bml.topology import UsageError

MOST_NBYTES = 4 * 10**9
"""Memory that a simulation may take."""
NODE_NBYTES = 150
"""Of one node with its arrows, while it is built and simulated: measured."""
_LONG = 8
_HALVINGS = 3

Column = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Traffic:
    """Nodes in columns, and arrows (before, after) between them.

    Attributes:
        sender: int32; -1 for a meeting.
        level: int32, the level of both NICs.
        receiver: int32.
        share: float64, bytes as a share of the vector.
        priority: int32; less goes first.
        before, after: int32 [arrow], nodes.
    """

    sender: Column
    level: Column
    receiver: Column
    share: NDArray[np.float64]
    priority: Column
    before: Column
    after: Column

    @property
    def n_nodes(self) -> int:
        """Number of nodes, meetings included."""
        return len(self.sender)


def check_size(n_nodes: int, name: str) -> None:
    """Raise UsageError if so many nodes cannot be simulated in MOST_NBYTES."""
    if n_nodes * NODE_NBYTES > MOST_NBYTES:
        raise UsageError(
            f"{name} sends {n_nodes} transfers, which would take {n_nodes * NODE_NBYTES / 1e9:.0f} GB to "
            f"simulate, up to {MOST_NBYTES / 1e9:.0f} GB are taken: choose longer slices (--slice), another "
            "--algorithm, or a smaller fabric"
        )


def cut(heaviest_nbytes: float, slice_nbytes: float) -> NDArray[np.float64]:
    """Return the slices of every piece as shares of it: equal ones, the first and last of many shorter.

    That is how `bml.protocol.step.cuts` cuts.
    """
    count = max(1, int(np.ceil(heaviest_nbytes / slice_nbytes - 1e-9)))
    if count < _LONG:
        return np.full(count, 1 / count)
    shorter = np.array([1.0, 1.0, 2.0, 4.0]) / (1 << _HALVINGS)
    return np.concatenate([shorter, np.ones(count - 2), shorter[::-1]]) / count


def sliced(once: Traffic, shares: NDArray[np.float64]) -> Traffic:
    """Return the traffic of all slices; they wait for no other slice, but share connections."""
    count, n = len(shares), once.n_nodes
    if count == 1:
        return once
    turn = np.arange(count, dtype=np.int32)
    shift = np.repeat(turn * n, len(once.before))

    def again(column: Column) -> Column:
        return np.tile(column, count)

    return Traffic(
        again(once.sender),
        again(once.level),
        again(once.receiver),
        np.outer(shares, once.share).ravel(),
        again(once.priority) + np.repeat(2 * turn, n),
        again(once.before) + shift,
        again(once.after) + shift,
    )


def of_forest(forest: Forest, name: str, n_slices: int) -> Traffic:
    """Return what a forest sends for each slice: a node for each hop, and one for each sum of several parts.

    Raises:
        UsageError: `n_slices` times that would not fit into memory.
    """
    shape = forest.parent.shape
    edges = int(np.count_nonzero(forest.parent >= 0))
    check_size((3 * edges + 4 * len(forest.detours)) * n_slices, name)
    builder = _Builder()
    sums = np.full(shape, -1, np.int32)
    gathers = np.zeros(shape, np.bool_)
    piece, server = np.nonzero(forest.parent >= 0)
    gathers[piece, forest.parent[piece, server]] = True
    sums[gathers] = builder.meetings(int(np.count_nonzero(gathers)))
    share = forest.weight / forest.whole
    first, last = _edges(forest, Phase.REDUCE, share, builder)
    into, here = sums[piece, forest.parent[piece, server]], sums[piece, server]
    builder.arrows(here, first[piece, server])
    builder.arrows(last[piece, server], into)
    rows = np.arange(forest.pieces)
    first, last = _edges(forest, Phase.BROADCAST, share, builder)
    tree = forest.parent if forest.broadcast is None else forest.broadcast.source
    last[rows, forest.root] = sums[rows, forest.root]
    piece, server = np.nonzero(tree >= 0)
    builder.arrows(last[piece, tree[piece, server]], first[piece, server])
    return builder.made()


def of_exchange(exchange: Exchange, name: str, n_slices: int) -> Traffic:
    """Return what an exchange sends for each slice; a round waits for all that the round before brings.

    Raises:
        UsageError: as `of_forest`.
    """
    hops = np.array(
        [
            (at, server, hop.level, hop.peer)
            for server, own in exchange.rounds.items()
            for at, partners in enumerate(own)
            for hop in partners
        ],
        np.int32,
    ).reshape(-1, 4)
    at, sender, level, receiver = hops.T
    n_meetings = exchange.n_rounds * exchange.fabric.n_servers
    check_size((len(hops) + n_meetings) * n_slices, name)
    builder = _Builder()
    done = builder.meetings(n_meetings).reshape(exchange.n_rounds, -1)
    nodes = builder.hops(sender, level, receiver, np.ones(len(hops)), Phase.REDUCE)
    builder.arrows(done[:-1].ravel(), done[1:].ravel())
    builder.arrows(nodes, done[at, receiver])
    later = at > 0
    builder.arrows(done[at[later] - 1, sender[later]], nodes[later])
    return builder.made()


def _edges(
    forest: Forest, phase: Phase, share: NDArray[np.float64], builder: _Builder
) -> tuple[Column, Column]:
    """Add the hops of a phase; return the first and the last one of each edge, -1 where there is none."""
    first = np.full(forest.parent.shape, -1, np.int32)
    last = first.copy()
    backwards = phase is Phase.BROADCAST and forest.broadcast is None
    for hops in forest.blocks(phase):
        nodes = builder.hops(hops.sender, hops.level, hops.receiver, share[hops.piece], phase)
        # The hops of a detour follow one another, from its start to its end; a direct edge has one hop.
        follows = (hops.piece[1:] == hops.piece[:-1]) & (hops.server[1:] == hops.server[:-1])
        starts, ends = np.ones((2, len(nodes)), np.bool_)
        starts[1:], ends[:-1] = ~follows, ~follows
        before, after = nodes[:-1][follows], nodes[1:][follows]
        if backwards:  # these are the hops of the reduce phase in its order, each of them reversed
            starts, ends, before, after = ends, starts, after, before
        builder.arrows(before, after)
        first[hops.piece[starts], hops.server[starts]] = nodes[starts]
        last[hops.piece[ends], hops.server[ends]] = nodes[ends]
    return first, last


class _Builder:
    """Gathers nodes and arrows."""

    def __init__(self) -> None:
        self._count = 0
        self._nodes: list[tuple[NDArray[np.generic], ...]] = []
        self._arrows: list[tuple[Column, Column]] = []

    def meetings(self, count: int) -> Column:
        """Add nodes that take no time; return their numbers."""
        nowhere = np.full(count, -1, np.int32)
        return self._add(nowhere, nowhere, nowhere, np.zeros(count), np.zeros(count, np.int32))

    def hops(
        self,
        sender: NDArray[np.integer],
        level: NDArray[np.integer],
        receiver: NDArray[np.integer],
        share: NDArray[np.float64],
        phase: Phase,
    ) -> Column:
        """Add transfers; return their numbers."""
        priority = np.full(len(sender), phase is Phase.REDUCE, np.int32)
        ends = (each.astype(np.int32) for each in (sender, level, receiver))
        return self._add(*ends, share, priority)

    def _add(self, *columns: NDArray[np.generic]) -> Column:
        first = self._count
        self._count += len(columns[0])
        self._nodes.append(columns)
        return np.arange(first, self._count, dtype=np.int32)

    def arrows(self, before: Column, after: Column) -> None:
        """Let `after` wait for `before`, where both are there (not -1)."""
        there = (before >= 0) & (after >= 0)
        self._arrows.append((before[there], after[there]))

    def made(self) -> Traffic:
        """Return all of it."""
        sender, level, receiver, share, priority = (
            np.concatenate(column) for column in zip(*self._nodes, strict=True)
        )
        before, after = (np.concatenate(column) for column in zip(*self._arrows, strict=True))
        return Traffic(sender, level, receiver, share, priority, before, after)
