"""Unequal shares as people and programs are shown them: in `bml status`, the report and the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bml.train.batches import FULL, Weights, sizes

_MOST_NAMED = 4
"""So many slow servers are named; of more, only the number is said."""
_SLOW = 0.9
"""Servers below this part of the fastest's speed are slow; if there are none, the slowest one is named."""


def shown(batch: int, weights: Weights, servers: Iterable[int]) -> dict[str, Any] | None:
    """Return the shares of a batch of so many samples, ready for JSON; None if all servers are as fast.

    `batch` is the size, `samples` has the share of each server, `speeds` each one's part of the fastest's
    speed.
    """
    of = {server: weights.get(server, FULL) for server in sorted(servers)}
    fastest = max(of.values())
    if min(of.values()) == fastest:
        return None
    return {
        "batch": batch,
        "samples": sizes(batch, of),
        "speeds": {server: round(weight / fastest, 3) for server, weight in of.items()},
    }


def in_words(shares: dict[str, Any] | None) -> str:
    """Say in one line which servers have less than others, and how many samples."""
    if shares is None:
        return "all servers compute equally fast, their shares are equal"
    batch, samples, speeds = shares["batch"], shares["samples"], shares["speeds"]
    by_speed = sorted(speeds, key=lambda each: speeds[each])
    slow = [server for server in by_speed if speeds[server] < _SLOW] or by_speed[:1]
    said = [
        f"server {server} computes at {speeds[server]:.0%} of the fastest's speed, its share is "
        f"{samples[server]} of {batch}"
        for server in slow[:_MOST_NAMED]
    ]
    more = [f"{len(slow) - _MOST_NAMED} more servers are slow"] * (len(slow) > _MOST_NAMED)
    return "; ".join([*said, *more])
