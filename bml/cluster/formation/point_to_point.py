"""Messages between two ranks: what is sent and waits, what has come, and who waits for it. Pure.

A message travels in parts. The receiver confirms each part, so that few bytes wait in queues, and the sender
knows when all have arrived. A rank sends its messages to another one at a time, in order. A message that
nobody waits for lies in the memory of its receiver.

    part      kind 0, tag, length of the message in bytes, bytes of the part
    received  kind 1: a part has arrived
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bml.errors import BmlError, ContributorLost
from bml.topology.errors import UsageError

ANY = -1
"""As the source of a message: any rank."""
_PART = struct.Struct(">BqQ")
_RECEIVED = b"\x01"
_PART_NBYTES = 1 << 20
_WINDOW = 4
"""How many parts may be on their way to a rank."""

Done = Callable[[int | BmlError], None]
"""Called once: with the rank of the other side, or with the error."""


@dataclass
class _Outgoing:
    tag: int
    data: memoryview
    done: Done
    n_sent: int = 0
    n_unconfirmed: int = 0

    @property
    def n_parts(self) -> int:
        return max(1, -(-self.data.nbytes // _PART_NBYTES))

    def next_part(self) -> bytes:
        start = self.n_sent * _PART_NBYTES
        self.n_sent += 1
        self.n_unconfirmed += 1
        part = self.data[start : start + _PART_NBYTES]
        return _PART.pack(0, self.tag, self.data.nbytes) + part


@dataclass
class _Wanted:
    source: int
    tag: int
    into: memoryview
    done: Done
    number: int = 0


@dataclass(eq=False)
class _Arriving:
    source: int
    tag: int
    nbytes: int
    data: bytearray = field(default_factory=bytearray)
    number: int = 0


Item = TypeVar("Item", _Wanted, _Arriving)


class _Queues(Generic[Item]):
    """What waits, in queues by tag and source: thousands of messages are not looked through for one."""

    def __init__(self) -> None:
        self._queues: dict[int, dict[int, deque[Item]]] = {}
        self._n = 0

    def __iter__(self) -> Iterator[Item]:
        return (each for sources in self._queues.values() for queue in sources.values() for each in queue)

    @property
    def sources(self) -> set[int]:
        return {source for sources in self._queues.values() for source in sources}

    def put(self, item: Item) -> None:
        item.number = self._n = self._n + 1
        self._queues.setdefault(item.tag, {}).setdefault(item.source, deque()).append(item)

    def first(self, tag: int, sources: Iterable[int] | None = None) -> Item | None:
        """The oldest with this tag of one of the sources, or of any."""
        queues = self._queues.get(tag, {})
        heads = [queues[each][0] for each in (queues if sources is None else sources) if each in queues]
        return min(heads, key=lambda each: each.number, default=None)

    def remove_first(self, item: Item) -> None:
        """Take out one that `first` gave."""
        queue = self._queues[item.tag][item.source]
        queue.popleft()
        if not queue:
            self._forget(item.tag, item.source)

    def remove_source(self, source: int) -> list[Item]:
        """Take out all of a source; returns them by their age."""
        gone = sorted((each for each in self if each.source == source), key=lambda each: each.number)
        for tag in {each.tag for each in gone}:
            self._forget(tag, source)
        return gone

    def _forget(self, tag: int, source: int) -> None:
        del self._queues[tag][source]
        if not self._queues[tag]:
            del self._queues[tag]


class PointToPoint:
    """The messages of one rank; `post(rank, message)` brings bytes on their way."""

    def __init__(self, post: Callable[[int, bytes], None]):
        self._post = post
        self._outgoing: dict[int, deque[_Outgoing]] = {}
        self._arriving: dict[int, _Arriving] = {}
        self._here = _Queues[_Arriving]()
        self._wanted = _Queues[_Wanted]()

    @property
    def partners(self) -> set[int]:
        """The ranks that something here waits for; ANY is among them if it may be any."""
        return {rank for rank, queue in self._outgoing.items() if queue} | self._wanted.sources

    def send(self, to: int, tag: int, data: memoryview, done: Done) -> None:
        """Send bytes, which must not change before `done` is called: then they are at the receiver."""
        queue = self._outgoing.setdefault(to, deque())
        queue.append(_Outgoing(tag, data, done))
        if len(queue) == 1:
            self._send_parts(to)

    def receive(self, source: int, tag: int, into: memoryview, done: Done) -> None:
        """Receive the next message with this tag of a rank, or of ANY, into memory of just its length."""
        wanted = _Wanted(source, tag, into, done)
        here = self._here.first(tag, None if source == ANY else (source,))
        if here is None:
            self._wanted.put(wanted)
        elif _give(here, wanted):
            self._here.remove_first(here)

    def came(self, source: int, message: bytes, answer: Callable[[bytes], None]) -> None:
        """A message of another rank has arrived; `answer` brings bytes back to it."""
        if message == _RECEIVED:
            self._confirmed(source)
            return
        _, tag, nbytes = _PART.unpack_from(message)
        arriving = self._arriving.setdefault(source, _Arriving(source, tag, nbytes))
        arriving.data += memoryview(message)[_PART.size :]
        answer(_RECEIVED)
        if len(arriving.data) >= arriving.nbytes:
            del self._arriving[source]
            self._arrived(arriving)

    def unsent(self, rank: int, why: str) -> None:
        """The connection to a rank has ended: what it has not confirmed is lost."""
        error = _unreachable(rank, why)
        for each in self._outgoing.pop(rank, ()):
            each.done(error)

    def cut(self, rank: int, why: str) -> None:
        """The connection from a rank has ended. If part of a message is here, the rest does not come.

        What arrived before can still be received, and receivers wait on if no message was on its way.
        """
        if self._arriving.pop(rank, None) is not None:
            self._give_up(rank, why)

    def lost(self, rank: int, why: str) -> None:
        """A rank is gone for ever; ANY: all others are. What arrived before can still be received."""
        self._arriving.pop(rank, None)
        self.unsent(rank, why)
        self._give_up(rank, why)

    def _give_up(self, rank: int, why: str) -> None:
        for wanted in self._wanted.remove_source(rank):
            wanted.done(_unreachable(rank, why))

    def fail(self, error: BmlError) -> None:
        """Nothing can be sent or received any more."""
        waiting = [each.done for queue in self._outgoing.values() for each in queue]
        waiting += [each.done for each in self._wanted]
        self._outgoing.clear()
        self._wanted = _Queues[_Wanted]()
        for done in waiting:
            done(error)

    def _send_parts(self, to: int) -> None:
        first = self._outgoing[to][0]
        while first.n_sent < first.n_parts and first.n_unconfirmed < _WINDOW:
            self._post(to, first.next_part())

    def _confirmed(self, to: int) -> None:
        queue = self._outgoing.get(to)
        if not queue:
            return  # it was given up
        first = queue[0]
        first.n_unconfirmed -= 1
        if first.n_sent == first.n_parts and first.n_unconfirmed == 0:
            queue.popleft()
            first.done(to)
        if queue:
            self._send_parts(to)

    def _arrived(self, here: _Arriving) -> None:
        """Give a message to the first that waits for it, and has room; it lies here if nobody does."""
        while wanted := self._wanted.first(here.tag, (here.source, ANY)):
            self._wanted.remove_first(wanted)
            if _give(here, wanted):
                return
        self._here.put(here)


def _give(here: _Arriving, wanted: _Wanted) -> bool:
    """Fill the memory of a receiver. One with another length is told so, and the message stays."""
    if wanted.into.nbytes != here.nbytes:
        wanted.done(_misfit(here, wanted))
        return False
    wanted.into[:] = here.data
    wanted.done(here.source)
    return True


def _unreachable(rank: int, why: str) -> ContributorLost:
    return ContributorLost(f"{'all others' if rank == ANY else f'rank {rank}'} cannot be reached: {why}")


def _misfit(here: _Arriving, wanted: _Wanted) -> UsageError:
    return UsageError(
        f"rank {here.source} sent {here.nbytes} bytes with tag {here.tag}, and {wanted.into.nbytes} are to "
        "be received: give an array of the same size and dtype"
    )
