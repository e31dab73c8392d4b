"""Measures how fast the connections of one server take bytes, only while more bytes wait for them.

Bytes per second of a connection that has nothing to send, or that passes on what comes in slowly, say nothing
of its rate. So only the time counts in which its queue was not empty. Times are seconds on one monotonic
clock, which the caller reads.
"""

from collections.abc import Mapping
from typing import NamedTuple

from bml.faults.detector import Link
from bml.faults.stalls import Flow

WINDOW = 2.0
"""In units of `detect_s`: so long servers measure before they say what they found, …"""

LEAST_WINDOW_S = 1.0
"""… and at least for so long: processes wait for a core, and steps last, as long as they do."""

LEAST_NBYTES = 8 << 10
"""Bytes below which a window says nothing: so little may have waited for something else. They count with
those of the next windows."""

LONG = 0.5
"""In units of the window: a connection that was busy for so long is slow, however little it carried."""


def window_s(detect_s: float) -> float:
    """For how many seconds servers measure before they say what they found."""
    return max(WINDOW * detect_s, LEAST_WINDOW_S)


class Sample(NamedTuple):
    """The connection to `peer` on `level` was busy for `busy_s` seconds, in which `nbytes` arrived there."""

    peer: int
    level: int
    nbytes: int
    busy_s: float


class Meter:
    """The connections of one server; what they carried is summed up over windows of `window_s` seconds."""

    def __init__(self, window_s: float, now: float) -> None:
        self._window_s = window_s
        self._flows: Mapping[Link, Flow] = {}
        self.restart(now)

    def restart(self, now: float) -> None:
        """Begin a new window: what was measured belongs to a view that is over."""
        self._began_at = now
        self._flows = {}
        self._sums: dict[Link, tuple[int, float]] = {}

    def look(self, flows: Mapping[Link, Flow]) -> None:
        """Take in what the kernel says now of all connections that are open."""
        before, self._flows = self._flows, flows
        for link, flow in flows.items():
            nbytes, busy_s = _moved(before.get(link), flow)
            old_nbytes, old_busy_s = self._sums.get(link, (0, 0.0))
            self._sums[link] = old_nbytes + nbytes, old_busy_s + busy_s

    def take(self, now: float) -> list[Sample]:
        """Return what was measured in the window, once it is over; else, or if that is nothing, nothing."""
        if now - self._began_at < self._window_s:
            return []
        # Windows are on a grid, so that those of all servers, which begin with a view, end together.
        self._began_at = now - (now - self._began_at) % self._window_s
        found = [Sample(*link, *self._sums.pop(link)) for link in sorted(self._sums) if self._is_enough(link)]
        return [each for each in found if each.busy_s > 0]

    def _is_enough(self, link: Link) -> bool:
        nbytes, busy_s = self._sums[link]
        return nbytes >= LEAST_NBYTES or busy_s >= LONG * self._window_s


def _moved(before: Flow | None, flow: Flow) -> tuple[int, float]:
    """Bytes and busy seconds between two looks; none of a connection that is new."""
    if before is None or flow.nbytes < before.nbytes or flow.busy_s < before.busy_s:
        return 0, 0.0
    return flow.nbytes - before.nbytes, flow.busy_s - before.busy_s
