"""The nodes of a job: whether they belong together, and which have gone. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

BEAT_S = 1.0
"""How often the launcher of a node counts up its number in the store."""
GONE_S = 10.0
"""A node whose number stood still for so long is gone."""


@dataclass(frozen=True)
class NodeRecord:
    """What the launcher of a node tells the others.

    Attributes:
        run_id: name of the job.
        n_nodes: number of nodes.
        n_ranks: number of ranks of this node.
        launcher: a name that no other launcher has.
    """

    run_id: str
    n_nodes: int
    n_ranks: int
    launcher: str

    def as_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return asdict(self)


def mismatch(node: int, mine: NodeRecord, other: NodeRecord) -> str:
    """Say why the launcher of another node is not of this job; empty if it is."""
    if other.run_id != mine.run_id:
        return f"node {node} was started with --rdzv-id {other.run_id}, this one with {mine.run_id}"
    if other.n_nodes != mine.n_nodes:
        return f"node {node} was started with --nnodes {other.n_nodes}, this one with {mine.n_nodes}"
    return ""


class Heartbeats:
    """The numbers that the launchers count up, as one of them sees them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        self.moved = False
        """Whether one of the numbers has changed since it was first seen."""

    def gone(self, counts: Mapping[int, int], now: float) -> list[int]:
        """Return the nodes whose numbers stood still for GONE_S, given those of all nodes at this time."""
        for node, count in counts.items():
            if node not in self._seen or self._seen[node][0] != count:
                self.moved = self.moved or node in self._seen
                self._seen[node] = (count, now)
        return [node for node in counts if now - self._seen[node][1] >= GONE_S]
