"""Decides when a checkpoint is made, alike on all servers, and what all of them know of the last one.

Where one is due, a small step asks all servers whether they are done with the last one. If all are, the
contributors of that step write one part each of the state at this boundary. In the next such step they say
what they have written. A checkpoint of which a writer was lost meanwhile is dropped, and another one is made
at once. A server that joins is given these decisions with the state, and those of the steps that it replays.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from bml.topology.errors import UsageError
from bml.train.collectives import Collectives
from bml.train.keeping.files import Files
from bml.train.keeping.parts import Key
from bml.train.keeping.writer import Writer
from bml.train.snapshot import Snapshot

_ASKS_AGAIN = 8
"""While a server still writes, the others ask again after this part of the steps between checkpoints."""

_Dump = tuple[int, int, int, tuple[int, ...], list[Key]]


def check_number(name: str, number: object) -> None:
    """Raise UsageError unless this is a whole number of steps or checkpoints."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UsageError(f"{name} is {number!r}: give a whole number, at least 1")


class Keeper:
    """The checkpoints of one session."""

    def __init__(self, collectives: Collectives, files: Files, every: int, keep: int):
        self.every, self.keep = every, keep
        self.writer = Writer(files, collectives.communicator.server, keep)
        self._collectives = collectives
        self._next_at = every
        self._begun = 0
        self._writers: tuple[int, ...] = ()
        """The servers that write a checkpoint of which it is not known that it is whole."""

    def is_due(self) -> bool:
        """Whether all servers must ask at this boundary; nothing may be under way there then."""
        newest, contributors = self._collectives.newest, self._collectives.contributors
        if not set(self._writers) <= set(contributors):
            self._writers, self._next_at = (), newest
        return newest >= self._next_at

    def pass_due(self, snapshot: Callable[[], Snapshot]) -> None:
        """Ask all servers, and begin to write if all are done with the last checkpoint."""
        collectives, server = self._collectives, self._collectives.communicator.server
        own = np.zeros(collectives.n_servers, np.int64)
        own[server] = 2 * self.writer.written + self.writer.is_busy
        text = f"session.checkpoint(every={self.every})"
        done = collectives.own_step(text, "sum", own.dtype, len(own), lambda view: own)
        collectives.note(done.step, done.contributors)
        said = {each: divmod(int(done.result[each]), 2) for each in done.contributors}
        if any(is_busy for _, is_busy in said.values()):
            self._next_at = done.step + max(1, self.every // _ASKS_AGAIN)
            return
        self._settle({each for each, (written, _) in said.items() if written == self._begun})
        self._begun, self._writers = done.step, tuple(sorted(done.contributors))
        self._next_at = done.step + self.every
        if server in self._writers and not collectives.communicator.replays:
            self.writer.begin(self._key(), self._writers.index(server), snapshot())

    def leave(self, snapshot: Callable[[], Snapshot]) -> None:
        """This server leaves at this boundary, perhaps as all do: it writes the state alone.

        Which of them is at a boundary before the job ends is not known, so none counts on another one.
        """
        collectives = self._collectives
        if collectives.communicator.server in collectives.contributors:
            self.writer.write(Key(collectives.newest, collectives.communicator.job, 1), snapshot())

    def resume(self, steps: int) -> None:
        """This job goes on from a checkpoint after so many steps."""
        self.writer.base, self._next_at = steps, steps + self.every

    def dump(self) -> bytes:
        """What all servers know, as bytes for a server that joins."""
        known: _Dump = (self._next_at, self._begun, self.writer.base, self._writers, self.writer.whole)
        return msgspec.msgpack.encode(known)

    def load(self, dumped: bytes) -> None:
        """Take over the bytes of `dump`. Raises msgspec.MsgspecError for other bytes."""
        known = msgspec.msgpack.decode(dumped, type=_Dump)
        self._next_at, self._begun, self.writer.base, self._writers, self.writer.whole = known

    def _key(self) -> Key:
        return Key(self._begun, self._collectives.communicator.job, len(self._writers))

    def _settle(self, wrote: set[int]) -> None:
        """Note whether the last checkpoint is whole, as these servers have written their parts."""
        if self._writers and wrote.issuperset(self._writers):
            self.writer.whole = [*self.writer.whole, self._key()][-self.keep :]
