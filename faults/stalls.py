"""Notices when a connection stands still although its peer is alive: heartbeats pass and data do not.

An ECMP path that leads nowhere, a firewall that has forgotten a connection, or a packet size that some
switch drops stops one TCP flow and leaves the datagrams of heartbeats alone. Only the sender can know: its
kernel has bytes that the peer's kernel does not acknowledge. A peer that rightly does not read
(back-pressure), is busy or is stopped still acknowledges, or answers probes of its closed window, because its
kernel does that for it.

All times are seconds on one monotonic clock, which the caller reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bml.faults.detector import Link

LEAST_TRIES = 2
"""Unanswered tries of the kernel. One may go unanswered in good health: Linux answers repeated probes of a
closed window at most every 0.5 s."""


class Flow(NamedTuple):
    """The state of one connection in its sender's kernel.

    `outstanding`: there are bytes that the peer's kernel has not acknowledged. `answers` grows with every
    acknowledgement that comes for them. `tries`: how often in a row the kernel has sent the oldest of them
    again, or has probed a closed window, without an answer. `busy_s` is for how many seconds in all bytes
    waited that the kernel did not take, though the peer had room; `nbytes` is how many went in that time.
    """

    outstanding: bool
    answers: int
    tries: int
    nbytes: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Line:
    since_s: float
    answers: int
    tries: int


class Stalls:
    """The connections of one server; one that is not answered for `detect_s` stands still."""

    def __init__(self, detect_s: float) -> None:
        self._detect_s = detect_s
        self._lines: dict[Link, _Line] = {}
        self._flows: Mapping[Link, Flow] = {}

    def look(self, flows: Mapping[Link, Flow], now: float) -> None:
        """Take in what the kernel says now of all connections that are open."""
        self._flows = flows
        lines: dict[Link, _Line] = {}
        for link, flow in flows.items():
            if not flow.outstanding:
                continue
            line = self._lines.get(link) or _Line(now, flow.answers, 0)
            if flow.answers != line.answers:
                line = _Line(now, flow.answers, flow.tries)
            line.tries = min(line.tries, flow.tries)
            lines[link] = line
        self._lines = lines

    def standing(self, now: float) -> dict[Link, float]:
        """The connections that stand still, and for how many seconds each."""
        return {
            link: now - line.since_s
            for link, line in self._lines.items()
            if now - line.since_s >= self._detect_s and self._flows[link].tries - line.tries >= LEAST_TRIES
        }
