"""Decides whether a lost server is started again. Pure: time is an argument."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container

from bml.cluster.spec.leaving import DRAINED, LEFT

MOST_STARTS = 3
"""How often a server that never becomes a member is started again within WITHIN_S."""
WITHIN_S = 60.0
"""In seconds."""

_WORTH = ("Evicted", "JoinFailed", DRAINED)
OUT = (*_WORTH, LEFT, "NotJoined")
"""Kinds of reports after which the others go on without the server: it was evicted, left on notice, or failed
in the runtime or, before it was a member, in the training function."""


DIED = "Died"
"""The kind of a server that was lost without a report."""
_REPLACED = (*_WORTH, DIED, LEFT)


def is_worth_it(kind: str) -> bool:
    """Whether another start of a server may end better than with a report of this kind, or without one.

    It does not where the training function raised, a call was wrong, or the server was asked to go, and not
    as its Ray node is draining: there are other nodes.
    """
    return kind in (*_WORTH, DIED)


def is_replaced(kind: str) -> bool:
    """Whether a spare takes the place of a server that was lost with a report of this kind, or DIED."""
    return kind in _REPLACED


class RestartPolicy:
    """Decides which lost servers are started again: all, except those that never become members."""

    def __init__(self) -> None:
        self._starts: defaultdict[int, deque[float]] = defaultdict(deque)

    def came_in(self, contributors: Container[int]) -> None:
        """Forget the starts of these servers, as they are members now."""
        for server in [each for each in self._starts if each in contributors]:
            del self._starts[server]

    def refusal(self, server: int, now: float) -> str:
        """Return why a lost server is not started again; if it is, count it and return an empty text."""
        starts = self._starts[server]
        while starts and now - starts[0] > WITHIN_S:
            starts.popleft()
        if len(starts) >= MOST_STARTS:
            return (
                f"it was started {MOST_STARTS} times within {WITHIN_S:.0f} s and never became a member: "
                "it is not started again"
            )
        starts.append(now)
        return ""
