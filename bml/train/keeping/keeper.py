"""Decides when a checkpoint is made, alike on all servers, and what all of them know of the last one.

Where one is due, a small step asks all servers whether they are done with the last one. If all are, the
contributors of that step write one part each of the state at this boundary. In the next such step they say
what they have written, and of which state. A checkpoint is dropped, and another one is made at once, if a
writer of it was lost meanwhile, failed, or had another state. A server that joins is given these decisions
with the state, and those of the steps that it replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from bml.topology.errors import UsageError
from bml.train.collectives import Collectives
from bml.train.keeping.files import Files
from bml.train.keeping.parts import Key
from bml.train.keeping.writer import Writer
from bml.train.snapshot import Snapshot

_MOST = 10**12
"""Steps between checkpoints, and checkpoints that stay: numbers of steps are sent as int64."""
_SLOW_S = 30.0
"""A disk that takes longer than two intervals and this is said to be slow."""
_MOST_DROPPED = 8
"""Of so many checkpoints that are not whole it is known, until other files show it."""


class _Dump(msgspec.Struct, array_like=True):
    """What all servers know alike."""

    next_at: int
    begun: int
    n_asked: int
    base: int
    writers: tuple[int, ...]
    whole: list[Key]
    dropped: list[Key]


_decode = msgspec.msgpack.Decoder(_Dump).decode


def check_number(name: str, number: object) -> None:
    """Raise UsageError unless this is a whole number of steps or checkpoints."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= _MOST:
        raise UsageError(f"{name} is {number!r}: give a whole number, at least 1 and at most {_MOST}")


class Keeper:
    """The checkpoints of one session."""

    def __init__(self, collectives: Collectives, files: Files, every: int, keep: int):
        self.every, self.keep = every, keep
        self.writer = Writer(files, collectives.communicator.server, keep)
        self._collectives = collectives
        self._next_at = every
        self._begun = 0
        self._begun_at_s = 0.0
        self._n_asked = 0
        """How often it was asked since whether the last checkpoint is written."""
        self._writers: tuple[int, ...] = ()
        """The servers that write a checkpoint of which it is not known that it is whole."""

    def is_due(self) -> bool:
        """Whether all servers must ask at this boundary; nothing may be under way there then."""
        newest, contributors = self._collectives.newest, self._collectives.contributors
        if not set(self._writers) <= set(contributors):
            self._drop()
            self._next_at = newest
        return newest >= self._next_at

    def pass_due(self, snapshot: Callable[[], Snapshot]) -> None:
        """Ask all servers, and begin to write if all are done with the last checkpoint."""
        collectives, server = self._collectives, self._collectives.communicator.server
        step, contributors, said = self._asked()
        if busy := [each for each, (_, is_busy, _) in said.items() if is_busy]:
            self._bear_with(busy, step)
            return
        self._settle({each: digest for each, (written, _, digest) in said.items() if written == self._begun})
        self._begun, self._writers, self._n_asked = step, contributors, 0
        self._next_at, self._begun_at_s = step + self.every, time.monotonic()
        if server in self._writers and not collectives.communicator.replays:
            self.writer.begin(self._key(), self._writers.index(server), snapshot())

    def _asked(self) -> tuple[int, tuple[int, ...], dict[int, tuple[int, int, int]]]:
        """Ask all servers; returns the step, its contributors, and of each (written, is busy, digest)."""
        collectives, n = self._collectives, self._collectives.n_servers
        server = collectives.communicator.server
        is_busy = self.writer.is_busy  # first: what is written meanwhile counts as being written
        own = np.zeros(2 * n, np.int64)
        own[server], own[n + server] = 2 * self.writer.written + is_busy, self.writer.digest
        text = f"session.checkpoint(every={self.every}, keep={self.keep})"
        done = collectives.own_step(text, "sum", own.dtype, len(own), lambda view: own)
        collectives.note(done.step, done.contributors)
        found = done.result
        said = {each: (*divmod(int(found[each]), 2), int(found[n + each])) for each in done.contributors}
        return done.step, tuple(sorted(done.contributors)), said

    def _bear_with(self, busy: list[int], step: int) -> None:
        """Ask again later, each time after twice as many steps: what is under way must end before."""
        if step >= self._begun + 2 * self.every and time.monotonic() > self._begun_at_s + _SLOW_S:
            self.writer.fail(
                f"server {busy[0]} still writes that of step {self._begun}: the disk is too slow"
            )
        self._next_at = step + min(1 << self._n_asked, self.every)
        self._n_asked = min(self._n_asked + 1, _MOST.bit_length())

    def leave(self, snapshot: Callable[[], Snapshot]) -> bool:
        """This server leaves at this boundary, perhaps as all do: it writes the state alone.

        Which of them is at a boundary before the job ends is not known, so none counts on another one.
        Returns whether the state could not be written.
        """
        collectives = self._collectives
        if collectives.communicator.server in collectives.contributors:
            self.writer.write(Key(collectives.newest, collectives.communicator.job, 1), snapshot())
            return bool(self.writer.error)
        return False

    def resume(self, steps: int) -> None:
        """This job goes on from a checkpoint after so many steps."""
        self.writer.base, self._next_at = steps, steps + self.every

    def dump(self) -> bytes:
        """What all servers know, as bytes for a server that joins."""
        writer = self.writer
        known = (self._next_at, self._begun, self._n_asked, writer.base, self._writers)
        return msgspec.msgpack.encode(_Dump(*known, writer.whole, writer.dropped))

    def load(self, dumped: bytes) -> None:
        """Take over the bytes of `dump`. Raises msgspec.MsgspecError for other bytes."""
        known = _decode(dumped)
        self._next_at, self._begun, self._n_asked = known.next_at, known.begun, known.n_asked
        self._writers, self.writer.base = known.writers, known.base
        self.writer.whole, self.writer.dropped = known.whole, known.dropped

    def _key(self) -> Key:
        return Key(self._begun, self._collectives.communicator.job, len(self._writers))

    def _settle(self, wrote: dict[int, int]) -> None:
        """Note whether the last checkpoint is whole: these servers have written parts, of these states."""
        digests = {wrote.get(each) for each in self._writers}
        if len(digests) == 1 and None not in digests:
            self.writer.whole = [*self.writer.whole, self._key()][-self.keep :]
            return
        if digests and None not in digests:
            self.writer.fail(
                "the servers' states differ: name by session.state nothing of which each server has its own"
            )
        self._drop()

    def _drop(self) -> None:
        """The last checkpoint is not whole, and will not be."""
        if self._writers:
            self.writer.dropped = [*self.writer.dropped, self._key()][-_MOST_DROPPED:]
        self._writers = ()
