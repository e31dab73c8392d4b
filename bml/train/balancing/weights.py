"""The weights by which batches are split: a function of the times that all servers have agreed on.

A server's weight is its speed in sixty-fourths of the speed of the fastest. All numbers are integers, so
every server comes to the same weights. They change only when that pays, and paid at the exchanges before as
well: one slow moment moves no samples. A change that is asked back at once was wrong, as when a batch takes a
time of its own besides that of its samples: the next one of its kind must be asked for twice as often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bml.train.batches import FULL, Weights, sizes

TAKES_AFTER = 2
"""So many exchanges in a row must find a server too slow for its share, before it gets less work.

It doubles when that was wrong.
"""
MOST_TAKES_AFTER = 8
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
    in a row asked for others than there were, `n_since` how many there were since the last change,
    `times` those that it followed.
    """

    weights: dict[int, int] = {}
    times: dict[int, int] = {}
    n_batches: int = 0
    wish: dict[int, int] = {}
    n_wished: int = 0
    n_since: int = 0
    takes_after: int = TAKES_AFTER
    patience: int = GIVES_BACK_AFTER
    took: bool = False
    gave_back: bool = False

    def among(self, servers: Iterable[int]) -> Weights:
        """Return the weights for a batch that is split among these servers; the fastest of them has FULL."""
        self.weights = self.weights | _rescaled(self.weights, servers)
        return self.weights

    def follow(self, times: Mapping[int, int], contributors: Iterable[int], global_batch: int) -> bool:
        """Follow the agreed times per sample (> 0, in any unit); returns whether the weights changed.

        A contributor without a time has just joined, or had no samples, and keeps its weight. Where a batch
        has fewer samples than contributors all are equal: one without samples would never be timed again.
        """
        now = _rescaled(self.weights, contributors)
        self.weights = self.weights | now  # of a batch that is under way they stay
        self.n_since += 1
        if global_batch < len(now):
            return self._equalise(now)
        case = _Case(now, times, self.times, global_batch)
        takes, gives_back = case.takes(case.target), case.gives_back(case.target)
        wish, self.wish = self.wish, case.target
        if not (takes or gives_back):
            self.n_wished = 0
            return False
        holds = case.takes(wish) if takes else case.gives_back(wish)
        self.n_wished = self.n_wished + 1 if holds else 1
        if self.n_wished < (self.takes_after if takes else self.patience):
            return False
        if takes:
            self._take()
        else:
            self._give_back()
        self.n_wished = self.n_since = 0
        self.times = dict(times)
        self.weights = self.weights | case.target
        return True

    def _take(self) -> None:
        if self.gave_back:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.took, self.gave_back = True, False

    def _give_back(self) -> None:
        if self.took:
            was_wrong = self.n_wished == self.n_since
            self.takes_after = min(2 * self.takes_after, MOST_TAKES_AFTER) if was_wrong else TAKES_AFTER
        self.took, self.gave_back = False, True

    def _equalise(self, now: dict[int, int]) -> bool:
        equal = dict.fromkeys(now, FULL)
        self.weights, self.n_wished = self.weights | equal, 0
        return now != equal


class _Case:
    """The weights `now` and the times of one exchange, and what other weights would do about them.

    `before` has the times of the last change.
    """

    def __init__(
        self, now: dict[int, int], times: Mapping[int, int], before: Mapping[int, int], global_batch: int
    ):
        self._now, self._times, self._before, self._n_samples = now, times, before, global_batch
        fastest = min(times.values(), default=0)
        self.target = now | {
            server: max(1, (2 * FULL * fastest + time) // (2 * time)) for server, time in times.items()
        }
        """Each measured server's speed, rounded."""
        self._longest, self._last = self._takes_longest(now)

    def takes(self, weights: Mapping[int, int]) -> bool:
        """Whether a server holds up the others, and would do so no more with these weights."""
        wanted, _ = self._takes_longest(weights)
        return self._is_slow() and 100 * wanted <= _PERCENT * self._longest

    def _is_slow(self) -> bool:
        """Whether the server that takes longest has become slow, rather than another one fast.

        Weights are relative to the fastest server, so they do not tell if that one is as slow as others now.
        """
        time, before = self._times.get(self._last, 0), self._before.get(self._last)
        if before is not None and 100 * time >= _RECOVERED_PERCENT * before:
            return True
        return self.target.get(self._last, 0) < self._now.get(self._last, 0)

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
    """Return the weights of these servers; the largest is FULL, also if the fastest server was lost.

    A server without a weight has FULL, too: it has just joined.
    """
    ids = sorted(servers)
    largest = max((weights[server] for server in ids if server in weights), default=FULL)
    return {server: max(1, weights.get(server, largest) * FULL // largest) for server in ids}
