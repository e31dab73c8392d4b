"""The weights by which batches are split: a function of the times that all servers have agreed on.

A server's weight is its speed in sixty-fourths of the speed of the fastest. All numbers are integers, so
every server comes to the same weights. They change only when that pays, and paid at the exchanges before as
well: one slow moment moves no samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bml.train.batches import FULL, sizes

TAKES_AFTER = 2
"""So many exchanges in a row must find a server too slow for its share, before it gets less work."""
GIVES_BACK_AFTER = 4
"""So many must find that a server could do more, before it gets more. It doubles when that was wrong."""
MOST_PATIENCE = 32
_PERCENT = 90
"""A batch must take no more than so many per cent of the time before a server gets less work for it."""
_RECOVERED_PERCENT = 125
"""A server whose speed is that much of its weight, in per cent, could do more."""


class Balance(msgspec.Struct):
    """The weights of one loop over batches, and what is remembered to change them: equal on all servers.

    `weights` has the contributors of the last exchange, and servers that were lost since: one that comes back
    has the weight that it had. `wish` has the weights that the last exchange asked for, `n_wished` how many
    in a row asked for others than there were.
    """

    weights: dict[int, int] = {}
    n_batches: int = 0
    wish: dict[int, int] = {}
    n_wished: int = 0
    patience: int = GIVES_BACK_AFTER
    gave_back: bool = False

    def follow(self, times: Mapping[int, int], contributors: Iterable[int], global_batch: int) -> bool:
        """Follow the agreed times per sample (> 0, in any unit); returns whether the weights changed.

        A contributor without a time has just joined, or had no samples, and keeps its weight.
        """
        now = _rescaled(self.weights, contributors)
        self.weights |= now  # the next server that joins is measured against the fastest of these
        case = _Case(now, times, global_batch)
        takes, gives_back = case.takes(case.target), case.gives_back(case.target)
        wish, self.wish = self.wish, case.target
        if not (takes or gives_back):
            self.n_wished = 0
            return False
        holds = case.takes(wish) if takes else case.gives_back(wish)
        self.n_wished = self.n_wished + 1 if holds else 1
        if self.n_wished < (TAKES_AFTER if takes else self.patience):
            return False
        if takes and self.gave_back:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.gave_back, self.n_wished = not takes, 0
        self.weights |= case.target
        return True


class _Case:
    """The weights `now` and the times of one exchange, and what other weights would do about them."""

    def __init__(self, now: dict[int, int], times: Mapping[int, int], global_batch: int):
        self._now, self._times, self._n_samples = now, times, global_batch
        fastest = min(times.values(), default=0)
        self.target = now | {
            server: max(1, (2 * FULL * fastest + time) // (2 * time)) for server, time in times.items()
        }
        """Each measured server's speed, rounded."""
        self._longest, self._last = self._takes_longest(now)

    def takes(self, weights: Mapping[int, int]) -> bool:
        """Whether a server holds up the others, and would do so no more with these weights."""
        wanted, _ = self._takes_longest(weights)
        is_slow = self.target.get(self._last, 0) < self._now.get(self._last, 0)
        return is_slow and 100 * wanted <= _PERCENT * self._longest

    def gives_back(self, weights: Mapping[int, int]) -> bool:
        """Whether a server could do more, and the batch would take less time with these weights."""
        wanted, _ = self._takes_longest(weights)
        can = any(
            100 * self.target[server] >= _RECOVERED_PERCENT * self._now[server] for server in self._times
        )
        return can and wanted < self._longest

    def _takes_longest(self, weights: Mapping[int, int]) -> tuple[int, int]:
        """Return the time of the server that computes longest with these weights, and that server's id."""
        parts = sizes(self._n_samples, {server: weights.get(server, at) for server, at in self._now.items()})
        return max(((parts[server] * time, server) for server, time in self._times.items()), default=(0, 0))


def _rescaled(weights: Mapping[int, int], servers: Iterable[int]) -> dict[int, int]:
    """Return the weights of these servers; the largest is FULL, also if the fastest server was lost."""
    of = {server: weights.get(server, FULL) for server in sorted(servers)}
    largest = max(of.values())
    return {server: max(1, weight * FULL // largest) for server, weight in of.items()}
