"""The ring of a flight recorder: segments, each a state of the core and the inputs that followed.

When a segment is full, the next begins with the state as it is then. So whatever is thrown away, what is left
can be replayed, and the state at the end of a segment must be that at the beginning of the next.

The last two segments are always there. A segment in which something happened (a view, an error) is kept, with
the one before it; of those only the newest few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MOST_ENTRIES = 1 << 15
"""Entries of a segment's list, two a frame and some more of other inputs; up to 50 bytes each."""
MOST_KEPT = 8
"""Segments beside the one that is being written."""


class Segment(NamedTuple):
    """Inputs in their order, as a flat list (see inputs.py), and the `state` before the first of them."""

    number: int
    state: bytes
    log: list[Any]


class Tape:
    """The ring; it begins with this state. The segment that is being written has always the same `log`.

    `ended` says why nothing is kept any more; "": it is.
    """

    def __init__(self, state: bytes):
        self.log: list[Any] = []
        self.ended = ""
        self._number = 0
        self._state = state
        self._happened = False
        self._closed: list[tuple[Segment, bool]] = []

    @property
    def is_full(self) -> bool:
        """Whether the segment has its length; some more inputs do no harm."""
        return len(self.log) >= MOST_ENTRIES

    @property
    def is_overfull(self) -> bool:
        """Whether it is twice as long: the next must begin with the next input, even if no tick comes."""
        return len(self.log) >= 2 * MOST_ENTRIES

    def end(self, why: str) -> None:
        """Throw everything away and keep nothing more, for this reason."""
        self.ended = why
        self._closed.clear()
        self.log.clear()

    def mark(self) -> None:
        """Something happened: keep this segment, and the one before."""
        self._happened = True
        if self._closed:
            self._closed[-1] = self._closed[-1][0], True

    def turn(self, state: bytes) -> None:
        """Begin the next segment with this state."""
        closed = [each for each in self._closed if each[1]]
        if len(closed) >= MOST_KEPT:
            del closed[0]
        closed.append((Segment(self._number, self._state, self.log.copy()), self._happened))
        self._closed = closed
        self._number += 1
        self._state, self._happened = state, False
        self.log.clear()

    def segments(self) -> tuple[Segment, ...]:
        """All that is kept, oldest first; a copy of what is being written."""
        return (*(each for each, _ in self._closed), Segment(self._number, self._state, self.log.copy()))
