"""The program of one server: its part in every piece, equal neighbouring pieces merged into one range.

A program is compiled locally: every server makes its own from (fabric, failures, algorithm), nothing of
it travels. For healthy BML that takes O(k^2 n) ranges and never builds the forest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bml.faults.detour import Path
from bml.schedule.ir.forest import NOT_THERE, BroadcastTrees, Forest, Phase
from bml.schedule.ir.symmetry import Symmetry
from bml.topology import Fabric, UsageError

__all__ = ["Bundle", "Hop", "Phase", "Program", "Range", "Relay", "compile_program", "local_bml"]


@dataclass(frozen=True)
class Hop:
    """One tree edge seen from this server.

    Attributes:
        peer: server at the other end of the tree edge.
        via: next server on the way to it, `peer` itself unless the edge is a detour.
        level: this server's NIC on that way.
    """

    peer: int
    via: int
    level: int


class Range(NamedTuple):
    """Adjacent pieces start .. stop-1 in which this server plays the same part.

    Attributes:
        start: first piece.
        stop: piece after the last one.
        reduce_from: children whose partial sums this server adds, in id order.
        reduce_to: parent that gets the sum; None where this server is the root.
        broadcast_from: server that sends the result; None where this server is the root.
        broadcast_to: servers to which this one passes the result, in id order.
    """

    start: int
    stop: int
    reduce_from: tuple[Hop, ...]
    reduce_to: Hop | None
    broadcast_from: Hop | None
    broadcast_to: tuple[Hop, ...]


@dataclass(frozen=True, order=True)
class Relay:
    """Frames of the tree edge origin -> dest that only pass through this server, pieces start .. stop-1.

    `via` is the next server on their way and `level` this server's outgoing NIC.
    """

    start: int
    stop: int
    phase: Phase
    origin: int
    dest: int
    via: int
    level: int


class Bundle(NamedTuple):
    """Results of adjacent pieces, start .. stop-1, that may go to each of these servers in one frame.

    No servers wait for each other in a circle: nothing that these results wait for waits for this server.
    """

    start: int
    stop: int
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Program:
    """All that one server does in one synchronisation.

    Attributes:
        server: its id.
        pieces: number of pieces of the vector.
        ranges: parts that cover all pieces, in piece order.
        relays: what it forwards for others, in piece order.
        cumulative: weight of all pieces before each boundary (pieces + 1 entries); None if all are equal.
        bundles: results that may be broadcast in one frame, as their sums were reduced in one; BML only.
    """

    server: int
    pieces: int
    ranges: tuple[Range, ...]
    relays: tuple[Relay, ...] = ()
    cumulative: tuple[int, ...] | None = None
    bundles: tuple[Bundle, ...] = ()

    @property
    def frames(self) -> int:
        """Frames of a short vector that this server sends and receives, without bundles."""
        own = sum(
            len(each.reduce_from)
            + len(each.broadcast_to)
            + (each.reduce_to is not None)
            + (each.broadcast_from is not None)
            for each in self.ranges
        )
        return own + 2 * len(self.relays)

    def cut(self, piece: int, n_elements: int) -> int:
        """Offset of the boundary before `piece` in a vector of n elements.

        (cumulative weight · n) // total weight, in exact integers: every server gets the same number.
        `cut(pieces, n)` is n; a piece of a vector shorter than the pieces may be empty.
        """
        if self.cumulative is None:
            return piece * n_elements // self.pieces
        return self.cumulative[piece] * n_elements // self.cumulative[-1]


_Array: TypeAlias = NDArray[np.integer]


_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


class _Edges(NamedTuple):
    """Tree edges of one server in columns: in which piece, and the fields of the `Hop`; -1 for none."""

    piece: _Array
    peer: _Array
    via: _Array
    level: _Array


_Way: TypeAlias = tuple[_Edges, _Edges]
"""One phase: a server's edges to its own peers, one per piece, and those of which it is the peer."""


def compile_program(forest: Forest, server: int, symmetry: Symmetry | None = None) -> Program:
    """Compile what a server does in any forest, or in one as a symmetry shows it.

    A forest that is only seen through a symmetry is not written down: that would take far longer.

    Raises:
        UsageError: the server is not in the forest (dead, or no such server).
    """
    exists = 0 <= server < forest.parent.shape[1]
    source = symmetry.source(server) if exists and symmetry else server
    if not exists or (forest.parent[:, source] == NOT_THERE).any():
        raise UsageError(f"server {server} has no part in this schedule: it is dead or does not exist")
    reduce = _seen(_reduce_way(forest, source), symmetry)
    broadcast = _seen(_broadcast_way(forest.broadcast, source), symmetry) if forest.broadcast else reduce
    relays = (
        relay if symmetry is None else _relay_seen(relay, symmetry) for relay in _passing(forest, source)
    )
    return Program(
        server, forest.pieces, _ranges(forest.pieces, reduce, broadcast), _merged(relays), _cumulative(forest)
    )


def _seen(way: _Way, symmetry: Symmetry | None) -> _Way:
    """The same edges as a symmetry shows them, again sorted by piece and peer."""
    if symmetry is None:
        return way
    own, fan = (
        _Edges(each.piece, symmetry.shown(each.peer), symmetry.shown(each.via), symmetry.turned(each.level))
        for each in way
    )
    order = np.lexsort((fan.peer, fan.piece))
    return own, _Edges(*(column[order] for column in fan))


def _relay_seen(relay: Relay, symmetry: Symmetry) -> Relay:
    origin, dest, via = symmetry.shown(np.array([relay.origin, relay.dest, relay.via])).tolist()
    level = int(symmetry.turned(np.array(relay.level)))
    return replace(relay, origin=origin, dest=dest, via=via, level=level)


def _reduce_way(forest: Forest, server: int) -> _Way:
    """The server's edges to its parents, one per piece, and those of its children.

    Where the broadcast is the reduce phase reversed, they are seen from here as the same hops.
    """
    own, fan = _direct(forest.parent, forest.level, server)
    for (piece, child), path in forest.detours.items():
        if child == server:
            _set(own, piece, _from_start(path))
        elif forest.parent[piece, child] == server:
            _set(fan, _row(fan, piece, child), _from_end(path))
    return own, fan


def _broadcast_way(trees: BroadcastTrees, server: int) -> _Way:
    """The edges from the server's sources, one per piece, and those on which it sends results on."""
    own, fan = _direct(trees.source, trees.level, server)
    for (piece, child), path in trees.detours.items():
        if child == server:
            _set(own, piece, _from_end(path))
        elif trees.source[piece, child] == server:
            _set(fan, _row(fan, piece, child), _from_start(path))
    return own, fan


def _direct(tree: NDArray[np.int32], level: NDArray[np.int8], server: int) -> _Way:
    """Edges to the server's own peers, one per piece, and to the servers whose peer it is, all as hops."""
    peer = np.maximum(tree[:, server], -1).astype(np.int64)
    own = _Edges(np.arange(len(tree)), peer, peer.copy(), level[:, server].astype(np.int64))
    found = np.flatnonzero(tree.reshape(-1) == server)
    piece, other = np.divmod(found, tree.shape[1])
    return own, _Edges(piece, other, other.copy(), level.reshape(-1)[found].astype(np.int64))


def _row(fan: _Edges, piece: int, peer: int) -> int:
    """Where a fan, sorted by piece and peer, has this edge."""
    start, stop = np.searchsorted(fan.piece, [piece, piece + 1])
    return int(start + np.searchsorted(fan.peer[start:stop], peer))


def _set(edges: _Edges, row: int, hop: Hop) -> None:
    edges.peer[row], edges.via[row], edges.level[row] = hop.peer, hop.via, hop.level


def _ranges(pieces: int, reduce: _Way, broadcast: _Way) -> tuple[Range, ...]:
    """Cut the pieces wherever the server's part changes, and describe each range by its first piece."""
    ways = (reduce,) if broadcast is reduce else (reduce, broadcast)
    changes = np.zeros(pieces, np.bool_)
    changes[:1] = True
    for own, fan in ways:
        names = _names(own)
        changes[1:] |= names[1:] != names[:-1]
        changes |= _changes(pieces, fan)
    starts = np.flatnonzero(changes)
    parts = [_parts(way, starts) for way in ways]
    (parents, gathers), (sources, spreads) = parts[0], parts[-1]
    stops = [*starts[1:].tolist(), pieces]
    return tuple(map(Range, starts.tolist(), stops, gathers, parents, sources, spreads))


def _names(edges: _Edges) -> _Array:
    """A number for every hop, equal for equal hops only; less than 0 for none."""
    size = int(max(edges.peer.max(initial=0), edges.via.max(initial=0))) + 1
    level, via = edges.level.astype(np.int64), edges.via.astype(np.int64)
    return (level * size + via) * size + edges.peer


def _changes(pieces: int, fan: _Edges) -> NDArray[np.bool_]:
    """Whether the hops of a fan differ from those in the piece before: one is new, or there are fewer."""
    key = np.sort(_names(fan) * (pieces + 1) + fan.piece)
    goes_on = key[1:][np.diff(key) == 1] % (pieces + 1)
    count = np.bincount(fan.piece, minlength=pieces)
    known = np.bincount(goes_on, minlength=pieces)
    before = np.concatenate([[0], count[:-1]])
    return np.asarray((known != count) | (before != count))


class _Hops(dict[tuple[int, int, int], Hop]):
    """One `Hop` for all edges that are alike: there are few of them."""

    def __missing__(self, fields: tuple[int, int, int]) -> Hop:
        return self.setdefault(fields, Hop(*fields))

    def of(self, edges: _Edges) -> list[Hop]:
        """Return the hop of every edge."""
        return [self[fields] for fields in zip(*(column.tolist() for column in edges[1:]), strict=True)]


def _parts(way: _Way, starts: _Array) -> tuple[list[Hop | None], list[tuple[Hop, ...]]]:
    """In each of these pieces, the own hop, None where there is none, and the hops of the fan in id order."""
    known = _Hops()
    asked = np.zeros(len(way[0].piece), np.bool_)
    asked[starts] = True
    own, fan = (_Edges(*(column[asked[edges.piece]] for column in edges)) for edges in way)
    hops = known.of(fan)
    firsts, lasts = (np.searchsorted(fan.piece, starts, side).tolist() for side in _SIDES)
    fans = [tuple(hops[first:last]) for first, last in zip(firsts, lasts, strict=True)]
    return [hop if hop.peer >= 0 else None for hop in known.of(own)], fans


def _from_start(path: Path) -> Hop:
    """The edge as its sending end sees it."""
    return Hop(path[-1][2], path[0][2], path[0][1])


def _from_end(path: Path) -> Hop:
    """The edge as its receiving end sees it."""
    return Hop(path[0][0], path[-1][0], path[-1][1])


def _cumulative(forest: Forest) -> tuple[int, ...] | None:
    if (forest.weight == forest.weight[0]).all():
        return None
    return tuple(accumulate(forest.weight.tolist(), initial=0))


def _merged(relays: Iterable[Relay]) -> tuple[Relay, ...]:
    """Merge equal neighbours."""
    single = sorted(relays, key=lambda relay: (_route(relay), relay.start))
    merged: list[Relay] = []
    for relay in single:
        last = merged[-1] if merged else None
        if last and last.stop == relay.start and _route(last) == _route(relay):
            merged[-1] = replace(last, stop=relay.stop)
        else:
            merged.append(relay)
    return tuple(sorted(merged))


def _route(relay: Relay) -> tuple[int, int, int, int, int]:
    return relay.phase, relay.origin, relay.dest, relay.via, relay.level


def _passing(forest: Forest, server: int) -> Iterator[Relay]:
    own_detours = forest.broadcast.detours if forest.broadcast else None
    edges = [(Phase.REDUCE, edge) for edge in forest.detours]
    edges += [(Phase.BROADCAST, edge) for edge in (forest.detours if own_detours is None else own_detours)]
    for phase, (piece, child) in edges:
        path = forest.path(piece, child, phase)
        for sender, level, receiver in path[1:]:
            if sender == server:
                yield Relay(piece, piece + 1, phase, path[0][0], path[-1][2], receiver, level)


def local_bml(fabric: Fabric, server: int) -> Program:
    """Compile a server's part in healthy BML straight from its address, without the forest.

    In thread p the pieces whose owner agrees with the server in its first j digits (in the thread's order)
    and has digit v next are one range of n^(k-1-j) pieces: the server gathers from all neighbours at those
    j levels and sends to the neighbour with digit v at the next. Equal to `compile_program` of the forest.
    """
    if fabric.failures:
        raise UsageError(f"{fabric} is damaged: compile its program from the forest of `plan`")
    threads = range(fabric.levels)
    ranges = [item for thread in threads for item in _thread_ranges(fabric, server, thread)]
    bundles = [item for thread in threads for item in _thread_bundles(fabric, server, thread)]
    return Program(server, fabric.levels * fabric.n_servers, tuple(ranges), bundles=tuple(bundles))


def _thread_bundles(fabric: Fabric, server: int, thread: int) -> list[Bundle]:
    """Pieces that are reduced in one range are broadcast in one: their owner agrees with this server so far.

    Before a bundle goes out over the level of some stage, results have to come over those of later stages,
    so no servers wait for each other in a circle.
    """
    n, k = fabric.ports, fabric.levels
    digits = fabric.address(server)
    start = thread * fabric.n_servers
    bundles: list[Bundle] = []
    for agreed in range(k - 1):
        level = (thread + agreed) % k
        width = n ** (k - 1 - agreed)
        start += digits[level] * width
        hops = tuple(Hop(peer, peer, level) for peer in fabric.neighbours(server, level))
        bundles.append(Bundle(start, start + width, hops))
    return bundles


def _thread_ranges(fabric: Fabric, server: int, thread: int) -> list[Range]:
    """Ranges of one thread, in piece order."""
    n, k = fabric.ports, fabric.levels
    digits = fabric.address(server)
    start = thread * fabric.n_servers
    neighbours: list[Hop] = []
    ranges: list[Range] = []
    for agreed in range(k):
        level = (thread + agreed) % k
        width = n ** (k - 1 - agreed)
        children = tuple(sorted(neighbours, key=lambda hop: hop.peer))
        for digit in range(n):
            if digit != digits[level]:
                parent = server + (digit - digits[level]) * n**level
                hop, first = Hop(parent, parent, level), start + digit * width
                ranges.append(Range(first, first + width, children, hop, hop, children))
        start += digits[level] * width
        neighbours += [Hop(peer, peer, level) for peer in fabric.neighbours(server, level)]
    children = tuple(sorted(neighbours, key=lambda hop: hop.peer))
    ranges.append(Range(start, start + 1, children, None, None, children))
    return sorted(ranges, key=lambda item: item.start)
