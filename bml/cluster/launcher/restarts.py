"""Decides whether a server that is gone is started again; time is an argument."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container

MOST_STARTS = 3
"""So often a server is started again that never comes in, within WITHIN_S."""
WITHIN_S = 60.0
"""In seconds."""

_WORTH = ("Evicted", "JoinFailed")
OUT = (*_WORTH, "Left", "NotJoined")
"""Kinds of reports of servers that the others do without: evicted, failed in the runtime or in the training
function before they were in, or gone on notice."""


def is_worth_it(kind: str) -> bool:
    """Whether another start of a server may end better than with a report of this kind.

    It does not where the training function raised, a call was wrong, or the server was asked to go.
    """
    return kind in _WORTH


class Comebacks:
    """Which lost servers are started again: all, but none for ever that never comes in."""

    def __init__(self) -> None:
        self._starts: defaultdict[int, deque[float]] = defaultdict(deque)

    def came_in(self, contributors: Container[int]) -> None:
        """These servers are in: what it took counts no more."""
        for server in [each for each in self._starts if each in contributors]:
            del self._starts[server]

    def refusal(self, server: int, now: float) -> str:
        """Why a lost server is not started again; empty: it is, and that start counts. `now` in seconds."""
        starts = self._starts[server]
        while starts and now - starts[0] > WITHIN_S:
            starts.popleft()
        if len(starts) >= MOST_STARTS:
            return (
                f"it was started {MOST_STARTS} times within {WITHIN_S:.0f} s and never came in: "
                "it is not started again"
            )
        starts.append(now)
        return ""
