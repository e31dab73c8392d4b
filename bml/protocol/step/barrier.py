"""The commit barrier: tiny tokens over the fabric, once a step, after which all are known complete.

On a healthy product fabric (BCube) the tokens go round the groups, level after level: after k rounds
every token has, through others, reached everybody. On any other, or a damaged one, they go along a
breadth-first spanning tree to its root and back. Either way a server has sent all its own
tokens when it passes, so nothing that it sends for the next step can overtake them on a connection.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from bml.topology import Fabric


class Token(NamedTuple):
    """One token to send: to neighbour `peer` over my NIC of `level`, marked with its `round`."""

    peer: int
    level: int
    round: int


class Phase(NamedTuple):
    """Wait for these (peer, round) tokens, then send those."""

    wait: frozenset[tuple[int, int]]
    send: tuple[Token, ...]


def barrier_phases(fabric: Fabric, server: int) -> tuple[Phase, ...]:
    """The phases of `server`: tokens to wait for, then tokens to send; it has passed after the last."""
    if not fabric.failures and fabric.wiring.is_product:
        return _by_levels(fabric, server)
    return _by_tree(fabric, server)


def _by_levels(fabric: Fabric, server: int) -> tuple[Phase, ...]:
    phases: list[Phase] = []
    wait: frozenset[tuple[int, int]] = frozenset()
    for level in range(fabric.levels):
        peers = fabric.neighbours(server, level)
        phases.append(Phase(wait, tuple(Token(peer, level, level) for peer in peers)))
        wait = frozenset((peer, level) for peer in peers)
    return (*phases, Phase(wait, ()))


_CLIMB, _DESCEND = 0, 1


def _by_tree(fabric: Fabric, server: int) -> tuple[Phase, ...]:
    parents = _spanning_tree(fabric)
    up = parents[server]
    children = [(child, hop[1]) for child, hop in parents.items() if hop is not None and hop[0] == server]
    from_below = frozenset((child, _CLIMB) for child, _ in children)
    to_below = tuple(Token(child, level, _DESCEND) for child, level in children)
    if up is None:
        return (Phase(from_below, to_below),)
    parent, level = up
    return (
        Phase(from_below, (Token(parent, level, _CLIMB),)),
        Phase(frozenset({(parent, _DESCEND)}), to_below),
    )


@lru_cache(maxsize=4)
def _spanning_tree(fabric: Fabric) -> dict[int, tuple[int, int] | None]:
    """Breadth-first: server -> (parent, level of the hop), None for the root."""
    root = fabric.servers[0]
    parents: dict[int, tuple[int, int] | None] = {root: None}
    queue = deque([root])
    while queue:
        at = queue.popleft()
        for level in range(fabric.levels):
            for peer in fabric.neighbours(at, level):
                if peer not in parents:
                    parents[peer] = (at, level)
                    queue.append(peer)
    return parents


class Barrier:
    """One server's passage through the barrier of one step."""

    def __init__(self, phases: tuple[Phase, ...]):
        self._phases = phases
        self._next = 0
        self._seen: set[tuple[int, int]] = set()
        self._entered = False

    def enter(self) -> list[Token]:
        """This server is complete; returns the tokens to send."""
        self._entered = True
        return self._advance()

    def token(self, peer: int, round_: int) -> list[Token]:
        """A token came in, before or after this server entered; returns the tokens to send."""
        self._seen.add((peer, round_))
        return self._advance() if self._entered else []

    @property
    def passed(self) -> bool:
        """Every server of the view is known to be complete."""
        return self._next == len(self._phases)

    @property
    def missing(self) -> list[int]:
        """The servers whose tokens are missing."""
        if self.passed:
            return []
        return sorted(peer for peer, _ in self._phases[self._next].wait - self._seen)

    def _advance(self) -> list[Token]:
        tokens: list[Token] = []
        while self._next < len(self._phases) and self._phases[self._next].wait <= self._seen:
            tokens += self._phases[self._next].send
            self._next += 1
        return tokens
