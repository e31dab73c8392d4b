"""What the ranks of a group write into their store, and read of it.

bml/host/RANK      the machine of a rank
bml/secret         the mark of rank 0's secret (bml.cluster.formation.secret), or "none"
bml/job            the job, with its token: without a secret, all that reach the store are trusted
bml/contact/RANK   the addresses of a rank in its first incarnation
bml/joined         how many joiners there were
bml/join/NUMBER    the rank and addresses of a joiner; the number is its incarnation
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple, Protocol

import msgspec

from bml.cluster.formation.settings import Host
from bml.cluster.spec.job import Contact, JobSpec
from bml.errors import StartError, UsageError

_JOB = "bml/job"
_JOINED = "bml/joined"
_SECRET = "bml/secret"
_NONE = "none"

_decode_host = msgspec.json.Decoder(Host).decode
_decode_job = msgspec.json.Decoder(JobSpec).decode


class Store(Protocol):
    """A key-value store that all ranks reach, such as those of torch.distributed.

    Any method may raise any error when the store is gone.
    """

    def set(self, key: str, value: bytes | str, /) -> object:
        """Store a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, once it has one."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number of a key, at first 0, and return the sum."""
        ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> object:
        """Wait until all keys have values; raises an error if that takes too long."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""
        ...


class Joined(NamedTuple):
    """A rank that was started again: its contact, and the number of its incarnation."""

    incarnation: int
    contact: Contact


class Entries:
    """The entries of a group of `size` ranks in its store. Every method may raise an error of the store.

    Methods that wait raise StartError, with the missing ranks, at `deadline` on the clock of time.monotonic.
    """

    def __init__(self, store: Store, size: int, deadline: float):
        self._store = store
        self._size = size
        self._deadline = deadline

    def came(self, rank: int, host: Host) -> None:
        """Say that a rank is there."""
        self._store.set(_host(rank), msgspec.json.encode(host))

    def hosts(self) -> list[Host]:
        """Wait for the machines of all ranks."""
        keys = list(map(_host, range(self._size)))
        return [_decode_host(value) for value in self._all(keys, "did not appear")]

    @property
    def has_job(self) -> bool:
        """Whether rank 0 has made the job."""
        return self._store.check([_JOB])

    def put_job(self, spec: JobSpec, mark: bytes) -> None:
        """Say what the job is, and by which mark rank 0 is known to have its secret."""
        self._store.set(_SECRET, mark.hex() or _NONE)
        self._store.set(_JOB, msgspec.json.encode(spec))

    def mark(self) -> bytes:
        """The mark of rank 0's secret, once the job is there. Raises UsageError if it cannot be one."""
        text = self._store.get(_SECRET).decode("ascii", "replace")
        try:
            return b"" if text == _NONE else bytes.fromhex(text)
        except ValueError:
            raise UsageError(f"{_SECRET} in the store of this group is {text!r:.80}, and no mark") from None

    def job(self) -> JobSpec:
        """Wait for the job."""
        if not self._wait([_JOB]):
            absent = self._without(map(_host, range(self._size)))
            why = _names(absent, "did not appear") if absent else "rank 0 did not say what the job is"
            raise StartError(f"the group cannot be formed: {why}")
        return _decode_job(self._store.get(_JOB))

    def has_contact(self, rank: int) -> bool:
        """Whether a rank was there before: a process that has its number now joins."""
        return self._store.check([_contact(rank)])

    def put_contact(self, contact: Contact) -> None:
        """Say where a rank is reached in its first incarnation."""
        self._store.set(_contact(contact.server), contact.encode())

    def contacts(self) -> dict[int, Contact]:
        """Wait for the addresses of all ranks in their first incarnations."""
        texts = self._all(list(map(_contact, range(self._size))), "appeared, but could not start")
        return {rank: Contact.decode(text.decode()) for rank, text in enumerate(texts)}

    def next_incarnation(self) -> int:
        """Return a number for a joiner, higher than all before it."""
        return self._store.add(_JOINED, 1)

    def put_join(self, joined: Joined) -> None:
        """Say where a joiner is reached."""
        self._store.set(_join(joined.incarnation), joined.contact.encode())

    def joined(self, known: Iterable[int] = ()) -> list[Joined]:
        """Return the joiners so far, the oldest first, without those of which the incarnation is `known`."""
        n_joined = int(self._store.get(_JOINED)) if self._store.check([_JOINED]) else 0
        numbers = set(range(1, n_joined + 1)).difference(known)
        there = [number for number in sorted(numbers) if self._store.check([_join(number)])]
        return [Joined(each, Contact.decode(self._store.get(_join(each)).decode())) for each in there]

    def _all(self, keys: list[str], but: str) -> list[bytes]:
        if not self._wait(keys):
            raise StartError(f"the group cannot be formed: {_names(self._without(keys), but)}")
        return [self._store.get(key) for key in keys]

    def _wait(self, keys: list[str]) -> bool:
        """Wait for values of the keys; returns whether they are there."""
        if not self._store.check(keys):
            try:
                self._store.wait(keys, timedelta(seconds=max(0.001, self._deadline - time.monotonic())))
            except Exception:  # each store has errors of its own for this
                return self._store.check(keys)
        return True

    def _without(self, keys: Iterable[str]) -> list[int]:
        """Return the ranks whose keys have no value."""
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def names(size: int) -> list[str]:
    """The keys of a group of `size` ranks that none has joined."""
    return [_JOB, _JOINED, _SECRET, *map(_host, range(size)), *map(_contact, range(size))]


def _names(ranks: list[int], but: str) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} {but} in time (start_s)"


def _host(rank: int) -> str:
    return f"bml/host/{rank}"


def _contact(rank: int) -> str:
    return f"bml/contact/{rank}"


def _join(incarnation: int) -> str:
    return f"bml/join/{incarnation}"
