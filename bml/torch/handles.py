"""Handles of process groups that others put together anew, and the ranks that follow from them.

A handle says which process it is of, and where the store of that process is reached, over which a group of
which it is rank 0 meets. Whoever decides about the membership passes handles on and reads nothing in them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import NamedTuple
from uuid import uuid4

import msgspec

from bml.topology.errors import UsageError
from bml.topology.notation import parse

_KIND = "bml:"


class Handle(NamedTuple):
    """A process: a name that no other has, and the address of its store."""

    name: str
    host: str
    port: int

    def encode(self) -> str:
        """The handle as a string."""
        return _KIND + msgspec.json.encode(self).decode()


_decode_fields = msgspec.json.Decoder(Handle).decode


class Place(NamedTuple):
    """The place of a process in a group: its rank, the number of ranks, and the handle of rank 0.

    `digest` is the same for the same handles by rank.
    """

    rank: int
    size: int
    first: Handle
    digest: str


class Uses:
    """The numbers of the groups that one process was in: each is used once."""

    def __init__(self) -> None:
        self._used = set[int]()

    def use(self, uuid: int) -> None:
        """Use a number. Raises RuntimeError, as PyTorch's own groups do, if it was used before."""
        if uuid in self._used:
            raise RuntimeError(f"the uuid {uuid} was already used by this process: give each group a new one")
        self._used.add(uuid)


def new_handle(host: str, port: int) -> Handle:
    """Make the handle of this process, whose store is reached there."""
    return Handle(uuid4().hex, host, port)


def place(own: Handle, handles: Collection[str]) -> Place:
    """Return the place of `own` in a group of these handles: by position, and in a set by their order.

    Raises UsageError for handles that are none of ours or there twice, and for a group without `own`.
    """
    texts = sorted(handles) if isinstance(handles, set | frozenset) else list(handles)
    found = [_decode(text) for text in texts]
    if own not in found:
        raise UsageError(
            "the handles are not those of this process's group: reconfigure in the processes whose handles "
            "they are"
        )
    twice = len(found) - len(set(found))
    if twice:
        raise UsageError(f"{twice} of {len(found)} handles are there twice: give each process one rank")
    digest = sha256(" ".join(each.name for each in found).encode()).hexdigest()
    return Place(found.index(own), len(found), found[0], digest)


def fabric_of(size: int, environ: Mapping[str, str]) -> str | None:
    """Return the fabric of a group of `size` ranks; None: as it follows from the environment.

    That of BML_FABRIC holds for groups of its size; others are behind one switch.
    """
    named = environ.get("BML_FABRIC")
    fits = not named or len(parse(named).servers) == size
    return None if fits else f"switch:{size}"


def check_nics(environ: Mapping[str, str]) -> None:
    """Raise UsageError for addresses of NICs that could be those of a process in one group alone."""
    nics = environ.get("BML_NICS", "")
    if "{n}" in nics or "," in nics:
        raise UsageError(
            f"BML_NICS is {nics!r}: groups that are put together anew change their ranks and sizes, so give "
            "each process one address of its own"
        )


def _decode(text: str) -> Handle:
    try:
        if text.startswith(_KIND):
            return _decode_fields(text.removeprefix(_KIND))
    except (AttributeError, msgspec.DecodeError):
        pass
    raise UsageError(f"{text!r} is no handle of backend bml: give what _get_reconfigure_handle returned")
