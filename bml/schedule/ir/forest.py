"""The intermediate form of every schedule: for each piece of the vector, the tree on which it is summed.

A step has two phases. In the reduce phase the partial sums of a piece travel along its tree to the root, the
server that owns the piece. In the broadcast phase the result travels back to all servers. As the roots share
the vector among themselves, the phases of all pieces together are a reduce-scatter and an all-gather.

Every algorithm makes a `Forest`. One verifier checks it, one cost model prices it, one engine runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from bml.faults.detour import Path

AT_ROOT = -1
"""Parent of the root of a piece."""
NOT_THERE = -2
"""Parent of a server that is not in the fabric."""

Edge: TypeAlias = tuple[int, int]
"""(piece, server): the tree edge between the server and its parent (in the broadcast phase: its source)."""
Detours: TypeAlias = Mapping[Edge, Path]

_BLOCK = 1 << 22
"""Entries of a (piece, server) table handled at once, so that 4096 servers do not multiply the memory."""


class Phase(IntEnum):
    """The phases of a step; over all pieces they are the reduce-scatter and the all-gather."""

    REDUCE = 0
    BROADCAST = 1


@dataclass(frozen=True, eq=False)
class BroadcastTrees:
    """Trees of the broadcast phase, for algorithms in which they are not those of the reduce phase reversed.

    Attributes:
        source: int32 [piece, server], sender of the result; AT_ROOT and NOT_THERE as in `Forest.parent`.
        level: int8 [piece, server], NIC on which the source sends.
        stage: int16 [piece, server], stage of the hop, counted from 0 within this phase.
        detours: paths of relayed edges, from the source to the server.
    """

    source: NDArray[np.int32]
    level: NDArray[np.int8]
    stage: NDArray[np.int16]
    detours: Detours = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Hops:
    """Physical hops in columns (int64, all of one length): a detour of three hops is three rows.

    `piece` and `server` name the tree edge to which the hop belongs, `sender` and `receiver` the two ends
    of the hop; `level` is the level of the switch between them, so of both NICs.
    """

    piece: NDArray[np.int64]
    server: NDArray[np.int64]
    stage: NDArray[np.int64]
    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]
    level: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees of all pieces in columns; a row is a piece, a column a server of the undamaged fabric.

    Attributes:
        root: int32 [piece], owner of the piece.
        weight: int64 [piece], share of P as an integer: the piece is weight / sum(weight) of the vector.
        parent: int32 [piece, server], parent; AT_ROOT at the root, NOT_THERE for dead servers.
        level: int8 [piece, server], NIC on which the server sends to its parent (first hop of a detour).
        stage: int16 [piece, server], stage of the hop, counted from 0; later towards the root. Only
            stage-by-stage pricing reads it. -1 where there is no parent.
        detours: (piece, server) -> path from the server to its parent through servers that only relay.
        broadcast: trees of the broadcast phase; None means those of `parent` reversed, last stage first.
    """

    root: NDArray[np.int32]
    weight: NDArray[np.int64]
    parent: NDArray[np.int32]
    level: NDArray[np.int8]
    stage: NDArray[np.int16]
    detours: Detours = field(default_factory=dict)
    broadcast: BroadcastTrees | None = None

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.root)

    @cached_property
    def whole(self) -> int:
        """Sum of the weights: the weight of all of P."""
        return int(self.weight.sum())

    def share(self, piece: int) -> Fraction:
        """Fraction of P that the piece holds."""
        return Fraction(int(self.weight[piece]), self.whole)

    def n_stages(self, phase: Phase) -> int:
        """Count the stages of a phase."""
        stage = self.broadcast.stage if phase is Phase.BROADCAST and self.broadcast else self.stage
        return int(stage.max(initial=-1)) + 1

    def edges_per_nic(self, levels: int) -> NDArray[np.int64]:
        """Weight of the tree edges of `parent` at each NIC, int64 [server, level]; the NIC is that of `level`
        at both ends, so there must be no detours."""
        n_servers = self.parent.shape[1]
        used = np.zeros(n_servers * levels, np.int64)
        rows = max(1, _BLOCK // max(1, n_servers))
        for start in range(0, self.pieces, rows):
            parent, level = self.parent[start : start + rows], self.level[start : start + rows]
            there = parent >= 0
            weight = np.repeat(self.weight[start : start + rows], there.sum(axis=1))
            at = level[there].astype(np.int64)
            for server in (parent[there], np.nonzero(there)[1]):
                used += _weighed(server * np.int64(levels) + at, weight, len(used))
        return used.reshape(n_servers, levels)

    def path(self, piece: int, server: int, phase: Phase = Phase.REDUCE) -> Path:
        """Hops (from, level, to) of the edge between a server and its parent, in the order of travel.

        Empty at the root. REDUCE goes from the server to its parent, BROADCAST from its source to the server.
        """
        if phase is Phase.BROADCAST and self.broadcast is None:
            return tuple((to, level, sender) for sender, level, to in reversed(self.path(piece, server)))
        tree, level, detours = self.parent, self.level, self.detours
        if phase is Phase.BROADCAST and self.broadcast:
            tree, level, detours = self.broadcast.source, self.broadcast.level, self.broadcast.detours
        peer = int(tree[piece, server])
        if peer < 0:
            return ()
        ends = (peer, server) if phase else (server, peer)
        return detours.get((piece, server), ((ends[0], int(level[piece, server]), ends[1]),))

    def blocks(self, phase: Phase) -> Iterator[Hops]:
        """Yield all physical hops of a phase, a bounded number of pieces at a time."""
        rows = max(1, _BLOCK // max(1, self.parent.shape[1]))
        for start in range(0, self.pieces, rows):
            yield self._hops(phase, start, min(start + rows, self.pieces))

    def _hops(self, phase: Phase, start: int, stop: int) -> Hops:
        if phase is Phase.BROADCAST and self.broadcast:
            tree = self.broadcast
            return _columns(tree.source, tree.level, tree.stage, tree.detours, start, stop, incoming=True)
        hops = _columns(self.parent, self.level, self.stage, self.detours, start, stop, incoming=False)
        return hops if phase is Phase.REDUCE else _reverse(hops, self.n_stages(Phase.REDUCE) - 1)


def _weighed(places: NDArray[np.int64], weight: NDArray[np.int64], n_places: int) -> NDArray[np.int64]:
    """Sum of the weights at each place; exact."""
    if (weight == 1).all():
        return np.bincount(places, minlength=n_places)
    found = np.zeros(n_places, np.int64)
    np.add.at(found, places, weight)
    return found


def _reverse(hops: Hops, last_stage: int) -> Hops:
    return Hops(hops.piece, hops.server, last_stage - hops.stage, hops.receiver, hops.sender, hops.level)


def _columns(
    peer: NDArray[np.int32],
    level: NDArray[np.int8],
    stage: NDArray[np.int16],
    detours: Detours,
    start: int,
    stop: int,
    *,
    incoming: bool,
) -> Hops:
    """Flatten pieces start..stop of a tree; `incoming` means that data flows from peer to server."""
    relayed = [(edge, path) for edge, path in detours.items() if start <= edge[0] < stop]
    direct = peer[start:stop] >= 0
    for edge, _ in relayed:
        direct[edge[0] - start, edge[1]] = False
    piece, server = (index.astype(np.int64) for index in np.nonzero(direct))
    piece += start
    peers = peer[piece, server]
    ends = (peers, server) if incoming else (server, peers)
    table = np.stack([piece, server, stage[piece, server], *ends, level[piece, server]])
    extra = [
        (*edge, int(stage[edge]), sender, receiver, hop_level)
        for edge, path in relayed
        for sender, hop_level, receiver in path
    ]
    if extra:
        table = np.concatenate([table, np.array(extra, np.int64).T], axis=1)
    return Hops(*table)
