"""Exchanges the times of all servers every few batches, and keeps the weights of each loop over batches."""

from __future__ import annotations

import msgspec
import numpy as np

from bml.train.balancing.shown import in_words, shown
from bml.train.balancing.weights import Balance
from bml.train.batches import EQUAL, BatchPlan, Weights
from bml.train.collectives import Collectives

EVERY = 8
"""So many batches are between two exchanges: a small step each, as fast as a barrier."""
FIRST = 4
"""So many are before the first one."""

_Key = tuple[int, int]
"""The size of the data set and of the global batch: loops that have both alike are taken for one."""
_decode = msgspec.msgpack.Decoder(tuple[_Key | None, list[tuple[_Key, Balance]]]).decode


class Balancer:
    """The weights of the loops of one session that balance; equal on all servers, and given to joiners."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives
        self._of: dict[_Key, Balance] = {}
        self._times: dict[_Key, list[float]] = {}
        self._last: _Key | None = None

    def next_batch(self, plan: BatchPlan) -> Weights:
        """Return the weights for the next batch of a loop. Every server calls it as that batch begins."""
        if self._collectives.position.aims:
            return EQUAL  # the others have begun this batch, and `load` will bring its weights
        key = (plan.n_samples, plan.global_batch)
        if key != self._last or key not in self._times:
            self._begin(key)
        balance = self._of[key]
        done, balance.n_batches = balance.n_batches, balance.n_batches + 1
        if done and (done == FIRST or done % EVERY == 0):
            self._exchange(balance, plan)
        return balance.among(self._collectives.contributors)

    def dump(self) -> bytes:
        """Return all weights and what belongs to them as bytes, for a server that joins."""
        return msgspec.msgpack.encode((self._last, list(self._of.items())))

    def load(self, dumped: bytes) -> None:
        """Take over the bytes of `dump`. Raises msgspec.MsgspecError for other bytes."""
        self._last, found = _decode(dumped)
        self._of = dict(found)

    def _begin(self, key: _Key) -> None:
        """Go on with a loop of other batches; one that is new begins with the weights of the one before."""
        if key not in self._of:
            weights = self._of[self._last].weights if self._last is not None else {}
            self._of[key] = Balance(dict(weights))
        self._last = key
        self._collectives.stopwatch.times = self._times.setdefault(key, [])

    def _exchange(self, balance: Balance, plan: BatchPlan) -> None:
        """Agree on the times in a step: a vector with a place for each server, and zeros in the others'."""
        collectives = self._collectives
        own = np.zeros(collectives.n_servers, np.int64)
        own[collectives.communicator.server] = collectives.stopwatch.take()
        done = collectives.own_step("session.batches: times", "sum", own.dtype, len(own), lambda view: own)
        collectives.note(done.step, done.contributors)
        times = {server: time for server in done.contributors if (time := int(done.result[server]))}
        changed = balance.follow(times, done.contributors, plan.largest)
        shares = shown(plan.largest, balance.weights, done.contributors)
        is_told = changed and collectives.communicator.server == min(done.contributors)
        collectives.communicator.show_shares(shares, in_words(shares) if is_told else "")
