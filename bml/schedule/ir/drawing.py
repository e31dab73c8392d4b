"""From trees drawn without regard to damage or cables to a forest: the dead are skipped, hops are routed.

An algorithm draws, for every piece, which server sends to which. It may draw dead servers, and edges between
servers that are no neighbours. `lay` makes the forest of it: a server whose peer is dead goes on to that
one's own peer; an edge takes the direct hop if a live one exists, else the wiring's own route if that is
alive, else a live detour.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bml.faults.detour import Path
from bml.schedule.ir.forest import AT_ROOT, NOT_THERE, BroadcastTrees, Detours, Forest
from bml.schedule.ir.routing import Balance, Router, joined
from bml.topology import Fabric, UsageError

ANY = -1
"""Level of a hop that may take any."""
MAX_RELAYED = 1 << 22
"""Relayed tree edges of one forest: each is an entry of its own."""


MOST_NBYTES = 4 * 10**9
"""Memory that building a forest may take."""
_ENTRY_NBYTES = 70
"""Of one server in one tree, one way, while the forest is built: measured."""


def check_room(fabric: Fabric, trees: int) -> None:
    """Raise UsageError if so many trees, those of both phases counted, cannot be built in MOST_NBYTES."""
    nbytes = trees * fabric.n_servers * _ENTRY_NBYTES
    if nbytes > MOST_NBYTES:
        raise UsageError(
            f"{trees} trees of {fabric.n_servers} servers would take {nbytes / 1e9:.0f} GB to build, up to "
            f"{MOST_NBYTES / 1e9:.0f} GB are taken: plan a smaller fabric of this kind (bml on a healthy "
            "BCube, or on a healthy torus of even size, needs no memory), or choose --algorithm tree"
        )


@dataclass(frozen=True, eq=False)
class Way:
    """Trees of one phase; a row is a piece, a column a server, dead ones too.

    Attributes:
        peer: int32, parent (reduce phase) or source (broadcast phase); AT_ROOT at the root.
        stage: int16, counted from 0 in the direction of travel.
        level: int8, NIC that the sender should use, ANY if it does not matter.
    """

    peer: NDArray[np.int32]
    stage: NDArray[np.int16]
    level: NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Draft:
    """The trees that an algorithm draws.

    Attributes:
        root: int32 [piece], owners; all are alive.
        turn: int8 [piece], which of several equal routes the piece takes where its edges are not direct.
        reduce: trees of the reduce phase.
        broadcast: trees of the broadcast phase; None means `reduce` reversed.
    """

    root: NDArray[np.int32]
    turn: NDArray[np.int8]
    reduce: Way
    broadcast: Way | None = None


def blank(pieces: int, fabric: Fabric) -> Way:
    """Make a way on which no server sends yet: all peers AT_ROOT, all levels ANY."""
    shape = (pieces, fabric.n_servers)
    return Way(np.full(shape, AT_ROOT, np.int32), np.full(shape, -1, np.int16), np.full(shape, ANY, np.int8))


def lay(fabric: Fabric, draft: Draft) -> Forest:
    """Make the forest of a draft: pieces of equal weight, survivors only, every hop over live parts.

    Raises:
        FabricError: two survivors that must talk are not joined by any live path.
        UsageError: more than MAX_RELAYED edges would need relays; the fabric is too large for this.
    """
    layer = _Layer(fabric, draft.turn)
    reduce, detours = layer.lay(draft.reduce, incoming=False)
    weight = np.ones(len(draft.root), np.int64)
    broadcast = None
    if draft.broadcast:
        way, broadcast_detours = layer.lay(draft.broadcast, incoming=True)
        broadcast = BroadcastTrees(way.peer, way.level, way.stage, broadcast_detours)
    return Forest(draft.root, weight, reduce.peer, reduce.level, reduce.stage, detours, broadcast)


class _Layer:
    """Lays both ways of a draft on one account of loads."""

    def __init__(self, fabric: Fabric, turn: NDArray[np.int8]) -> None:
        self._fabric = fabric
        self._turn = turn
        self._router = Router(fabric)
        self._balance = Balance(fabric)

    def lay(self, way: Way, *, incoming: bool) -> tuple[Way, Detours]:
        """Skip the dead and route all edges of a way; `incoming` means that data flows from the peer."""
        way = _without_dead(self._fabric, way)
        piece, server = np.nonzero(way.peer >= 0)
        peer = way.peer[piece, server].astype(np.int64)
        sender, receiver = (peer, server) if incoming else (server, peer)
        level = self._direct_levels(sender, receiver, way.level[piece, server], self._turn[piece])
        way.level[piece, server] = level
        direct = level != ANY
        stage = way.stage[piece, server]
        self._balance.add_direct(sender[direct], level[direct], receiver[direct], stage[direct])
        edges = np.stack([piece, server, sender, receiver], axis=1)[~direct]
        if len(edges) > MAX_RELAYED:
            raise UsageError(
                f"{len(edges)} tree edges of this schedule on {self._fabric} join no "
                f"neighbours, at most {MAX_RELAYED} are built; choose bml, or a smaller fabric"
            )
        return way, self._relay(way, edges, incoming=incoming)

    def _direct_levels(
        self,
        sender: NDArray[np.integer],
        receiver: NDArray[np.integer],
        wished: NDArray[np.int8],
        turn: NDArray[np.int8],
    ) -> NDArray[np.int8]:
        """Level of the direct hop of each edge, the wished one if that is alive; ANY where there is none."""
        found = np.full(len(sender), ANY, np.int8)
        choices = np.zeros(len(sender), np.int8)
        for level in reversed(range(self._fabric.levels)):
            here = joined(self._fabric, sender, np.full(len(sender), level), receiver)
            found[here] = level
            choices += here
        kept = joined(self._fabric, sender, wished, receiver)
        # Parallel cables (a ring of two): the route that belongs to the turn says which.
        for i in np.flatnonzero((choices > 1) & ~kept).tolist():
            path = self._router.nominal(int(sender[i]), int(receiver[i]), int(turn[i]))
            found[i] = path[0][1] if path else found[i]
        return np.where(kept, wished, found)

    def _relay(self, way: Way, edges: NDArray[np.integer], *, incoming: bool) -> dict[tuple[int, int], Path]:
        """Route the edges (piece, server, from, to) that no hop joins: own routes first, then detours."""
        paths: dict[tuple[int, int], Path] = {}
        broken: list[tuple[int, int, int, int]] = []
        for piece, server, source, target in edges.tolist():
            path = self._router.nominal(source, target, int(self._turn[piece]))
            if path:
                self._take(way, paths, (piece, server), path, incoming=incoming)
            else:
                broken.append((piece, server, source, target))
        for piece, server, source, target in broken:
            path = self._balance.pick(source, target, int(way.stage[piece, server]))
            self._take(way, paths, (piece, server), path, incoming=incoming)
        return paths

    def _take(
        self,
        way: Way,
        paths: dict[tuple[int, int], Path],
        edge: tuple[int, int],
        path: Path,
        *,
        incoming: bool,
    ) -> None:
        """Give an edge its path, cut short where it meets a server nearer to the root than its peer is."""
        path = _cut_short(way, edge, path, incoming=incoming)
        way.peer[edge] = path[0][0] if incoming else path[-1][2]
        way.level[edge] = path[0][1]
        self._balance.add(path, int(way.stage[edge]))
        if len(path) > 1:
            paths[edge] = path


def _cut_short(way: Way, edge: tuple[int, int], path: Path, *, incoming: bool) -> Path:
    """Leave out the part of a path beyond its first server that is on the peer's own way to the root.

    Without that a partial could be relayed by its own root on the way to a server that sends it back.
    """
    piece, server = edge
    ancestors: set[int] = set()
    at = int(way.peer[piece, way.peer[piece, server]])
    while at >= 0:
        ancestors.add(at)
        at = int(way.peer[piece, at])
    if not ancestors:
        return path
    if incoming:
        starts = [i for i, (sender, _, _) in enumerate(path) if i and sender in ancestors]
        return path[starts[-1] :] if starts else path
    stops = [i for i, (_, _, receiver) in enumerate(path) if receiver in ancestors]
    return path[: stops[0] + 1] if stops else path


def _without_dead(fabric: Fabric, way: Way) -> Way:
    """Copy a way in which no server's peer is dead; dead servers are not in it."""
    peer, stage, level = way.peer.copy(), way.stage.copy(), way.level.copy()
    alive = np.zeros(fabric.n_servers, np.bool_)
    alive[list(fabric.servers)] = True
    # Stages grow towards the root: a server that skips a dead peer still sends before that peer's peer does.
    while (skips := (peer >= 0) & ~alive[peer]).any():
        peer = np.where(skips, np.take_along_axis(way.peer, np.where(skips, peer, 0), axis=1), peer)
        level[skips] = ANY
    peer[:, ~alive] = NOT_THERE
    stage[:, ~alive] = -1
    level[:, ~alive] = ANY
    return Way(peer, stage, level)
