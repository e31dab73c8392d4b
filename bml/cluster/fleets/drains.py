"""Decides which servers get notice because Ray drains their machines. Pure: time is an argument.

Ray drains a node before it takes it away: it starts nothing there any more, and may have said until when what
runs there can go on. A server on it leaves at its next boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

_SHOWN = 12  # characters of the id of a node
_LEAVES = 0.6
"""Of the time that the launcher's node has left, for how much servers may take to leave, …"""
_LEAVES_S = 15.0
"""… and how long if it has not said how much that is: Ray drains for 30 s if nobody says otherwise."""


class Drains:
    """The notices of one job. A server counts as another one in every incarnation.

    Each server on a draining node is given notice until it has heard it. A node may stop draining no more.

    Servers that leave at one boundary are missed by one view, and each view must keep more than half of those
    before it. So fewer than half of the servers are leaving at a time, those first whose nodes end first. If
    all nodes are draining nothing is to be kept, and all leave.
    """

    def __init__(self) -> None:
        self._draining: Mapping[str, int] = {}
        self._here: Mapping[int, int] = {}
        self._homes: dict[tuple[int, int], str] = {}
        self._told: set[tuple[int, int]] = set()
        self._heard: set[tuple[int, int]] = set()
        self._has_ended = False

    def seen(self, draining: Mapping[str, int], here: Mapping[int, int]) -> None:
        """Note what is so now: draining nodes, and the incarnations of the servers that run.

        A node has the time at which it ends, in ms since 1970; 0: it has said none.
        """
        self._draining, self._here = draining, here

    @property
    def homeless(self) -> list[int]:
        """The servers whose nodes are to be found out: before one drains, as a busy server answers late."""
        return [each for each in self._here if self._key(each) not in self._homes]

    def lives(self, server: int, incarnation: int, node: str) -> None:
        """A server is on this node."""
        self._homes[server, incarnation] = node

    def notices(self, now_ms: float) -> Iterator[tuple[int, str]]:
        """Yield the servers that are to leave now, each with the reason."""
        ends_ms = {server: self._draining[node] for server, node in self._nodes() if node in self._draining}
        told = {server for server in self._here if self._key(server) in self._told}
        leaving = {server for server in told if server in ends_ms or self._key(server) in self._heard}
        n_here, all_drain = len(self._here), len(leaving | ends_ms.keys()) == len(self._here)
        room = n_here if all_drain else max(1, (n_here - 1) // 2)
        for server in sorted(ends_ms, key=lambda each: (ends_ms[each] or inf, each)):
            key = self._key(server)
            if key in self._heard or (server not in leaving and len(leaving) >= room):
                continue
            leaving.add(server)
            self._told.add(key)
            yield server, f"its {self._in_words(self._homes[key], now_ms)}"

    def end_of(self, node: str, now_ms: float) -> tuple[str, float] | None:
        """Say once that this node, the launcher's, is draining, so that the job ends.

        Returns why, and the seconds within which its servers are to leave; None if it is not, or was said.
        """
        if node not in self._draining or self._has_ended:
            return None
        self._has_ended = True
        left_s = self._left_s(node, now_ms)
        within_s = _LEAVES_S if left_s is None else _LEAVES * left_s
        return f"the launcher's {self._in_words(node, now_ms)}", within_s

    def _in_words(self, node: str, now_ms: float) -> str:
        left_s = self._left_s(node, now_ms)
        left = "" if left_s is None else f", and ends in {left_s:.0f} s"
        return f"Ray node {node[:_SHOWN]} is draining{left}"

    def _left_s(self, node: str, now_ms: float) -> float | None:
        """How long a draining node goes on; None: it has not said."""
        ends_ms = self._draining[node]
        return max(0.0, ends_ms - now_ms) / 1e3 if ends_ms else None

    def _nodes(self) -> Iterator[tuple[int, str]]:
        """The servers that run, and the nodes of those of which that is known."""
        for server in self._here:
            node = self._homes.get(self._key(server))
            if node is not None:
                yield server, node

    def heard(self, server: int) -> None:
        """A server has heard the notice: it is not told again."""
        self._heard.add(self._key(server))

    def made_leave(self, server: int, incarnation: int) -> bool:
        """Whether a server left because it was told to; it may have heard it though its answer was lost."""
        return (server, incarnation) in self._told

    def _key(self, server: int) -> tuple[int, int]:
        return server, self._here[server]
