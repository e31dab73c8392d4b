"""Decides which servers get notice because Ray drains their machines. Pure: time is an argument.

Ray drains a node before it takes it away: it starts nothing there any more, and may have said until when what
runs there can go on. A server on it leaves at its next boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_SHOWN = 12  # characters of the id of a node


class Drains:
    """The notices of one job. A server counts as another one in every incarnation.

    Each server on a draining node is given notice until it has heard it. A node may stop draining no more.
    """

    def __init__(self) -> None:
        self._draining: Mapping[str, int] = {}
        self._here: Mapping[int, int] = {}
        self._homes: dict[tuple[int, int], str] = {}
        self._told: set[tuple[int, int]] = set()
        self._heard: set[tuple[int, int]] = set()

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
        for server in sorted(self._here):
            key = self._key(server)
            node = self._homes.get(key)
            if node is None or node not in self._draining or key in self._heard:
                continue
            self._told.add(key)
            ends_ms = self._draining[node]
            left = f", and ends in {max(0.0, ends_ms - now_ms) / 1e3:.0f} s" if ends_ms else ""
            yield server, f"its Ray node {node[:_SHOWN]} is draining{left}"

    def heard(self, server: int) -> None:
        """A server has heard the notice: it is not told again."""
        self._heard.add(self._key(server))

    def made_leave(self, server: int, incarnation: int) -> bool:
        """Whether a server left because it was told to; it may have heard it though its answer was lost."""
        return (server, incarnation) in self._told

    def _key(self, server: int) -> tuple[int, int]:
        return server, self._here[server]
