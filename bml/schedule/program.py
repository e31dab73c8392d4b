"""What one server does: its part in every piece, equal neighbouring pieces merged into one range.

A program is compiled locally: every server makes its own from (fabric, failures, algorithm), nothing of
it travels. For healthy BML that takes O(k^2 n) ranges and never builds the forest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from bml.schedule.forest import NOT_THERE, Forest, Phase
from faults.detour import Path
from topology import Fabric, UsageError

__all__ = ["Hop", "Phase", "Program", "Range", "Relay", "compile_program", "local_bml"]


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


@dataclass(frozen=True)
class Range:
    """Adjacent pieces start .. stop-1 in which this server plays the same part.

    Attributes:
        start: first piece.
        stop: piece after the last one.
        gather: children whose partial sums this server adds, in id order.
        up: parent that gets the sum; None where this server is the root.
        down: who brings the result; None where this server is the root.
        spread: servers to which this one passes the result, in id order.
    """

    start: int
    stop: int
    gather: tuple[Hop, ...]
    up: Hop | None
    down: Hop | None
    spread: tuple[Hop, ...]


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


@dataclass(frozen=True)
class Program:
    """All that one server does in one synchronisation.

    Attributes:
        server: its id.
        pieces: number of pieces of the vector.
        ranges: parts that cover all pieces, in piece order.
        relays: what it forwards for others, in piece order.
        cumulative: weight of all pieces before each boundary (pieces + 1 entries); None if all are equal.
    """

    server: int
    pieces: int
    ranges: tuple[Range, ...]
    relays: tuple[Relay, ...] = ()
    cumulative: tuple[int, ...] | None = None

    def cut(self, piece: int, n_elements: int) -> int:
        """Offset of the boundary before `piece` in a vector of n elements.

        (cumulative weight · n) // total weight, in exact integers: every server gets the same number.
        `cut(pieces, n)` is n; a piece of a vector shorter than the pieces may be empty.
        """
        if self.cumulative is None:
            return piece * n_elements // self.pieces
        return self.cumulative[piece] * n_elements // self.cumulative[-1]


_Part: TypeAlias = tuple[tuple[Hop, ...], Hop | None, Hop | None, tuple[Hop, ...]]


def compile_program(forest: Forest, server: int) -> Program:
    """Compile what a server does in any forest.

    Raises:
        UsageError: the server is not in the forest (dead, or no such server).
    """
    if not 0 <= server < forest.up.shape[1] or (forest.up[:, server] == NOT_THERE).any():
        raise UsageError(f"server {server} has no part in this schedule: it is dead or does not exist")
    gather, spread = _fan(forest, server, Phase.UP), _fan(forest, server, Phase.DOWN)
    ranges: list[Range] = []
    for piece in range(forest.pieces):
        _append(
            ranges,
            piece,
            (
                gather.get(piece, ()),
                _own(forest, piece, server, Phase.UP),
                _own(forest, piece, server, Phase.DOWN),
                spread.get(piece, ()),
            ),
        )
    return Program(server, forest.pieces, tuple(ranges), _relays(forest, server), _cumulative(forest))


def _append(ranges: list[Range], piece: int, part: _Part) -> None:
    last = ranges[-1] if ranges else None
    if last and (last.gather, last.up, last.down, last.spread) == part:
        ranges[-1] = replace(last, stop=piece + 1)
    else:
        ranges.append(Range(piece, piece + 1, *part))


def _own(forest: Forest, piece: int, server: int, phase: Phase) -> Hop | None:
    """This server's edge to its parent (UP) or from its source (DOWN)."""
    if forest.root[piece] == server:
        return None
    path = forest.path(piece, server, phase)
    return _from_start(path) if phase is Phase.UP else _from_end(path)


def _fan(forest: Forest, server: int, phase: Phase) -> dict[int, tuple[Hop, ...]]:
    """Per piece, the edges on which others send to this server (UP) or get from it (DOWN), in id order."""
    tree = forest.down.source if phase is Phase.DOWN and forest.down else forest.up
    found: dict[int, tuple[Hop, ...]] = {}
    for piece, other in np.argwhere(tree == server).tolist():
        path = forest.path(piece, other, phase)
        hop = _from_end(path) if phase is Phase.UP else _from_start(path)
        found[piece] = (*found.get(piece, ()), hop)
    return found


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


def _relays(forest: Forest, server: int) -> tuple[Relay, ...]:
    """What passes through this server, equal neighbours merged."""
    single = sorted(_passing(forest, server), key=lambda relay: (_route(relay), relay.start))
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
    own_down = forest.down.detours if forest.down else None
    edges = [(Phase.UP, edge) for edge in forest.detours]
    edges += [(Phase.DOWN, edge) for edge in (forest.detours if own_down is None else own_down)]
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
    ranges = [item for thread in range(fabric.levels) for item in _thread_ranges(fabric, server, thread)]
    return Program(server, fabric.levels * fabric.n_servers, tuple(ranges))


def _thread_ranges(fabric: Fabric, server: int, thread: int) -> list[Range]:
    """Ranges of one thread, in piece order."""
    n, k = fabric.ports, fabric.levels
    digits = fabric.address(server)
    start = thread * fabric.n_servers
    gather: list[Hop] = []
    ranges: list[Range] = []
    for agreed in range(k):
        level = (thread + agreed) % k
        width = n ** (k - 1 - agreed)
        children = tuple(sorted(gather, key=lambda hop: hop.peer))
        for digit in range(n):
            if digit != digits[level]:
                parent = server + (digit - digits[level]) * n**level
                hop, first = Hop(parent, parent, level), start + digit * width
                ranges.append(Range(first, first + width, children, hop, hop, children))
        start += digits[level] * width
        gather += [Hop(peer, peer, level) for peer in fabric.neighbours(server, level)]
    children = tuple(sorted(gather, key=lambda hop: hop.peer))
    ranges.append(Range(start, start + 1, children, None, None, children))
    return sorted(ranges, key=lambda item: item.start)
