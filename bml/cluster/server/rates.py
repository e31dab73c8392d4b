"""Bytes per second and NIC, from the transport's counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bml.transport.interface import LinkKey, LinkStats

WINDOW_S = 1.0
"""Rates are those of the last one to two windows."""


@dataclass(frozen=True)
class Traffic:
    """Counters of one NIC, in bytes, headers included, and rates in bytes per second."""

    nbytes_sent: int
    nbytes_received: int
    sent_per_s: float
    received_per_s: float


class Rates:
    """Remembers earlier values of the counters; `levels` is the number of NICs."""

    def __init__(self, levels: int, now: float):
        zero = [(0, 0)] * levels
        self._marks = [(now, zero), (now, zero)]  # the older one, the newer one

    def due(self, now: float) -> bool:
        """Whether the counters are to be noted."""
        return now - self._marks[1][0] >= WINDOW_S

    def note(self, stats: Mapping[LinkKey, LinkStats], now: float) -> None:
        """Note the counters as they are."""
        self._marks = [self._marks[1], (now, self._totals(stats))]

    def traffic(self, stats: Mapping[LinkKey, LinkStats], now: float) -> list[Traffic]:
        """Counters and rates by level."""
        since_s, before = self._marks[0]
        seconds = max(now - since_s, 1e-9)
        return [
            Traffic(sent, received, (sent - sent_then) / seconds, (received - received_then) / seconds)
            for (sent, received), (sent_then, received_then) in zip(self._totals(stats), before, strict=True)
        ]

    def _totals(self, stats: Mapping[LinkKey, LinkStats]) -> list[tuple[int, int]]:
        levels = range(len(self._marks[0][1]))
        return [
            (_sum(stats, level, "nbytes_sent"), _sum(stats, level, "nbytes_received")) for level in levels
        ]


def _sum(stats: Mapping[LinkKey, LinkStats], level: int, counter: str) -> int:
    values: Iterable[int] = (getattr(each, counter) for (_, at), each in stats.items() if at == level)
    return sum(values)
