"""The events of a coordinator, and the instructions that it returns to its shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bml.protocol.wire import messages as msg


@dataclass(frozen=True)
class Connected:
    """The control connection to a server is up (for the first time, or again)."""

    server: int


@dataclass(frozen=True)
class Gone:
    """A server's process is known to be dead, or cannot be reached any more."""

    server: int
    why: str


@dataclass(frozen=True)
class Unreached:
    """A server could not be called for so many seconds. No call was refused, so it may only be busy."""

    server: int
    why: str
    for_s: float


@dataclass(frozen=True)
class From:
    """A message of a server."""

    server: int
    message: msg.ToCoordinator


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = Connected | Gone | Unreached | From | Tick


class Post(NamedTuple):
    """Send a message to a server, if it is connected."""

    server: int
    message: msg.ToServer


class Finished(NamedTuple):
    """The job is over; `abort` says why when it is an error.

    `deposed_by`: it is over for this coordinator alone, as there is one with this higher term; 0: it is not.
    """

    abort: msg.Abort | None
    deposed_by: int = 0


Instruction = Post | Finished
