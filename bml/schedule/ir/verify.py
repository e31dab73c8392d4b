"""The one verifier of all schedules: every contribution exactly once, over what is alive, root by root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bml.faults.detour import Path
from bml.schedule.ir.forest import AT_ROOT, NOT_THERE, Detours, Forest, Hops, Phase
from bml.topology import Fabric

_SHOWN = 5
"""Violations of one kind that are spelled out; the rest is counted."""

_BoolTable = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Tree:
    """One phase of a forest: the columns to check and the words for them."""

    phase: Phase
    peer: NDArray[np.int32]
    level: NDArray[np.int8]
    stage: NDArray[np.int16]
    detours: Detours


def verify(forest: Forest, fabric: Fabric) -> list[str]:
    """Check a forest against a fabric and return what is wrong with it, in words; empty when sound.

    Sound means: positive shares that make up P; every live server contributes exactly once to every piece
    and gets its result exactly once; no cycles; dead servers take no part; every hop joins two live NICs
    of one live switch; detours lead from end to end over live relays without a loop; stages grow towards
    the root. At most a few violations of a kind are spelled out.
    """
    problems = _shape_problems(forest, fabric)
    if problems:
        return problems
    problems += _piece_problems(forest, fabric)
    for tree in _trees(forest):
        broken = list(_peer_problems(forest, fabric, tree))
        problems += broken
        if broken:
            continue
        problems += _reach_problems(forest, tree)
        problems += _stage_problems(tree)
        # Hops of a detour that is no path of this tree would only repeat what is said about it here.
        problems += list(_detour_problems(tree)) or list(_hop_problems(forest, fabric, tree))
    return problems


def _trees(forest: Forest) -> Iterator[_Tree]:
    yield _Tree(Phase.REDUCE, forest.parent, forest.level, forest.stage, forest.detours)
    if forest.broadcast:
        broadcast = forest.broadcast
        yield _Tree(Phase.BROADCAST, broadcast.source, broadcast.level, broadcast.stage, broadcast.detours)


def _some(found: Iterable[str], total: int) -> Iterator[str]:
    """Yield a few messages of one kind and how many more there are."""
    for shown, message in enumerate(found):
        if shown == _SHOWN:
            yield f"... and {total - _SHOWN} more like this"
            return
        yield message


def _entries(wrong: _BoolTable, text: str) -> Iterator[str]:
    """Messages for the (piece, server) entries that are wrong."""
    total = int(np.count_nonzero(wrong))
    if total:
        places = np.argwhere(wrong)[: _SHOWN + 1].tolist()
        yield from _some((text.format(piece=piece, server=server) for piece, server in places), total)


def _shape_problems(forest: Forest, fabric: Fabric) -> list[str]:
    pieces, table = (forest.pieces,), (forest.pieces, fabric.n_servers)
    wanted = [("weight", forest.weight.shape, pieces), ("parent", forest.parent.shape, table)]
    wanted += [("level", forest.level.shape, table), ("stage", forest.stage.shape, table)]
    if forest.broadcast:
        broadcast = forest.broadcast
        wanted.append(("broadcast.source", broadcast.source.shape, table))
        wanted.append(("broadcast.level", broadcast.level.shape, table))
        wanted.append(("broadcast.stage", broadcast.stage.shape, table))
    problems = [
        f"column {name} has shape {shape}, {fabric.name} needs {needed}"
        for name, shape, needed in wanted
        if shape != needed
    ]
    return problems or ([] if forest.pieces else ["the forest has no pieces: shares sum to 0, not to 1"])


def _piece_problems(forest: Forest, fabric: Fabric) -> Iterator[str]:
    for piece in np.flatnonzero(forest.weight < 1).tolist():
        yield f"piece {piece} has weight {forest.weight[piece]}: every share must be positive"
    dead_root = ~np.isin(forest.root, np.array(fabric.servers))
    for piece in np.flatnonzero(dead_root).tolist():
        yield f"piece {piece} is owned by server {forest.root[piece]}, which is not alive"


def _peer_problems(forest: Forest, fabric: Fabric, tree: _Tree) -> Iterator[str]:
    """Check that each live server has one live peer in each piece, the root none, and the dead are absent."""
    alive = np.zeros(fabric.n_servers, np.bool_)
    alive[list(fabric.servers)] = True
    is_root = forest.root[:, None] == np.arange(fabric.n_servers)
    has_peer = (tree.peer >= 0) & (tree.peer < fabric.n_servers)
    to_dead = has_peer & ~alive[np.where(has_peer, tree.peer, 0)]
    reducing = tree.phase is Phase.REDUCE
    yield from _entries(
        is_root & (tree.peer != AT_ROOT) & alive,
        "piece {piece} is counted twice: its root, server {server}, sends its sum on"
        if reducing
        else "piece {piece}: its root, server {server}, is sent the result that it made",
    )
    yield from _entries(
        ~is_root & alive & ~has_peer,
        "server {server} never contributes to piece {piece}"
        if reducing
        else "server {server} never gets the result of piece {piece}",
    )
    yield from _entries(~alive & (tree.peer != NOT_THERE), "dead server {server} takes part in piece {piece}")
    yield from _entries(
        alive & to_dead, "the peer of server {server} in piece {piece} is a server that is not alive"
    )


def _reach_problems(forest: Forest, tree: _Tree) -> Iterator[str]:
    """Follow the peers of all servers at once, doubling the distance each time, to the root."""
    n_servers = tree.peer.shape[1]
    everyone = np.arange(n_servers, dtype=np.int32)
    jump = np.where(tree.peer >= 0, tree.peer, everyone)
    for _ in range(n_servers.bit_length()):
        further = np.take_along_axis(jump, jump, axis=1)
        if np.array_equal(further, jump):
            break
        jump = further
    lost = (tree.peer >= 0) & (jump != forest.root[:, None])
    text = (
        "the contribution of server {server} to piece {piece} goes round in a cycle"
        if tree.phase is Phase.REDUCE
        else "the result of piece {piece} never reaches server {server}: its sources form a cycle"
    )
    yield from _entries(lost, text)


def _stage_problems(tree: _Tree) -> Iterator[str]:
    """An inner server must have gathered before it sends: stages grow with the direction of travel."""
    has_peer = tree.peer >= 0
    yield from _entries(
        has_peer & (tree.stage < 0), "the hop of server {server} in piece {piece} has no stage"
    )
    peer = np.where(has_peer, tree.peer, 0)
    peer_stage = np.take_along_axis(tree.stage, peer, axis=1)
    inner = has_peer & (np.take_along_axis(tree.peer, peer, axis=1) >= 0)
    late = peer_stage <= tree.stage if tree.phase is Phase.REDUCE else peer_stage >= tree.stage
    yield from _entries(
        inner & late, "server {server} and its peer in piece {piece} send in the wrong order of stages"
    )


def _detour_problems(tree: _Tree) -> Iterator[str]:
    found = [
        f"detour of server {server} in piece {piece} {problem}"
        for (piece, server), path in tree.detours.items()
        if (problem := _detour_problem(tree, piece, server, path))
    ]
    yield from _some(found, len(found))


def _detour_problem(tree: _Tree, piece: int, server: int, path: Path) -> str:
    """Say what is wrong with one detour; empty when nothing is."""
    pieces, n_servers = tree.peer.shape
    if not (0 <= piece < pieces and 0 <= server < n_servers) or tree.peer[piece, server] < 0:
        return "belongs to no edge of the tree"
    peer = int(tree.peer[piece, server])
    ends = (server, peer) if tree.phase is Phase.REDUCE else (peer, server)
    stops = [path[0][0], *(receiver for _, _, receiver in path)] if path else []
    if not path or (stops[0], stops[-1]) != ends:
        return f"does not lead from server {ends[0]} to server {ends[1]}"
    if any(hop[2] != following[0] for hop, following in pairwise(path)):
        return "is not one connected path"
    if len(set(stops)) != len(stops):
        return f"passes a server twice: {stops}"
    if not all(0 <= stop < n_servers for stop in stops):
        return f"passes a server that does not exist: {stops}"
    if path[0][1] != tree.level[piece, server]:
        return f"leaves over NIC {path[0][1]}, the edge says NIC {tree.level[piece, server]}"
    return ""


def _hop_problems(forest: Forest, fabric: Fabric, tree: _Tree) -> Iterator[str]:
    """Check that every physical hop joins two live NICs of one live switch."""
    for hops in forest.blocks(tree.phase):
        exists = (hops.level >= 0) & (hops.level < fabric.levels)
        exists &= (np.minimum(hops.sender, hops.receiver) >= 0) & (
            np.maximum(hops.sender, hops.receiver) < fabric.n_servers
        )
        level = np.where(exists, hops.level, 0)
        sender, receiver = np.where(exists, hops.sender, 0), np.where(exists, hops.receiver, 0)
        joined = exists & (sender != receiver)
        joined &= fabric.groups[sender, level] == fabric.groups[receiver, level]
        live = fabric.nics[sender, level] & fabric.nics[receiver, level]
        yield from _hop_messages(hops, ~joined, "which are not on one switch")
        yield from _hop_messages(hops, joined & ~live, "of which a NIC or the switch is not alive")


def _hop_messages(hops: Hops, wrong: _BoolTable, text: str) -> Iterator[str]:
    places = np.flatnonzero(wrong)
    yield from _some(
        (
            f"piece {hops.piece[i]} goes from NIC {hops.sender[i]}/{hops.level[i]} to NIC "
            f"{hops.receiver[i]}/{hops.level[i]}, {text}"
            for i in places[: _SHOWN + 1].tolist()
        ),
        len(places),
    )
