"""The interface of a fleet: it starts servers and a coordinator, reports their ends, and asks them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bml.cluster.spec.job import Contact, JobSpec, Request, ServerReport
from bml.errors import BmlError, StartError
from bml.faults import Fault
from bml.io.interruptible import Event
from bml.protocol.coordinator.succession import GiveUp, Kill, Start, Succession


@dataclass(frozen=True)
class Reported:
    """A server has ended, with its report."""

    report: ServerReport


@dataclass(frozen=True)
class Died:
    """A server's process is gone without a report."""

    server: int
    why: str


@dataclass(frozen=True)
class Changed:
    """The coordinator's newest snapshot (see CoordinatorLoop.snapshot)."""

    snapshot: dict[str, Any]


@dataclass(frozen=True)
class NotInjected:
    """A fault that could not be applied to the cables or the machine when its time came."""

    fault: str
    why: str


@dataclass(frozen=True)
class Headless:
    """What runs the machines or the job is gone, or about to go: all servers leave.

    They are not awaited after `within_s`.
    """

    why: str
    within_s: float


FleetEvent = Reported | Died | Changed | NotInjected | Headless

ApplyFault = Callable[[Fault, Callable[[], None]], None]
"""Applies a fault to real cables or a machine, and calls the function when it is in force or has failed."""

Answers = Mapping[int, dict[str, Any]]
"""Server -> its answer (see `Server.answer`); a server that did not answer in time is missing."""


class Patience(NamedTuple):
    """How long answers are waited for, in seconds: `all_s` for all of them.

    As long as no answer says more than that a server does nothing, it is `one_s`, if that is longer.
    """

    all_s: float
    one_s: float = 0.0

    def left_s(self, answers: Answers, since_s: float) -> float:
        """How long to wait on for these answers, `since_s` after the question; 0: no longer."""
        says = any(any(answer.values()) for answer in answers.values())
        return max(0.0, (self.all_s if says else max(self)) - since_s)


class Spares(Protocol):
    """The spares of one job: processes that wait, with all imports done, for the places of lost servers."""

    def start(self) -> None:
        """Start them. Idempotent.

        It is called when no server is awaited: a spare would take the machine that such a server waits for.
        """
        ...

    @property
    def left(self) -> int:
        """How many wait; any thread may ask."""
        ...

    def set_aside(self, lost: int, free: Collection[int]) -> int | None:
        """Set a spare aside for the place of a lost server; None if there is no spare.

        Returns the address with which `Fleet.join` is to start it: that of the lost server, or one of those
        that are `free`: no server is there.
        """
        ...


class NoSpares:
    """See Spares; there are none."""

    left = 0

    def start(self) -> None:
        """See Spares."""

    def set_aside(self, lost: int, free: Collection[int]) -> int | None:
        """See Spares."""
        return None


class Fleet(Protocol):
    """The processes of one job. One thread calls all methods except `join` and `ask`.

    Any number of threads may be in `ask`, and in `join` for different servers, while that one is in `wait`.
    """

    spec: JobSpec
    """The specification of the job, with all open settings decided."""

    @property
    def spares(self) -> Spares:
        """Its spares. The thread that calls `wait` starts them, and sets them aside."""
        ...

    def start(self, train: bytes) -> None:
        """Start every server and the coordinator, but no spare; `train` is the pickled training function."""
        ...

    def join(self, server: int, incarnation: int, give_up: Event) -> None:
        """Start a server that is gone, or was absent: it joins. Remains of an older incarnation are ended.

        If a spare is set aside for it, the spare becomes this server.

        `incarnation` is its number, higher than that of any server that was started before.
        Raises StartError if it does not come up, or soon after `give_up` is set.
        """
        ...

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """Wait up to `timeout_s` for events and return them; start another coordinator if need be.

        Raises StartError if the job cannot get a coordinator.
        """
        ...

    def ask(self, request: Request, patience: Patience) -> Answers:
        """Ask every running server, and wait for the answers while another thread is in `wait`."""
        ...

    def close(self) -> None:
        """End every process of the job and leave nothing behind. Idempotent."""
        ...


@dataclass
class Known:
    """The facts about servers that a launcher knows. Every coordinator is told them, and every change."""

    contacts: dict[int, Contact] = field(default_factory=dict)
    """The last known addresses of each server."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """The incarnations of servers that joined while the job ran."""
    gone: dict[int, str] = field(default_factory=dict)
    """Why servers died that were not started again."""

    def came(self, server: int, incarnation: int, contact: Contact) -> None:
        """A server was started to join."""
        self.incarnations[server], self.contacts[server] = incarnation, contact
        self.gone.pop(server, None)


def reachable(server: int, said: Contact | BmlError) -> Contact:
    """Return the addresses in the first message of a server. Raises StartError if that is an error."""
    if isinstance(said, BmlError):
        raise StartError(f"server {server} cannot start: {said}")
    return said


def look_after(
    succession: Succession, now: float, kill: Callable[[], object], start: Callable[[int], None]
) -> None:
    """Do an action of the succession: kill the newest coordinator, or start one with some term.

    Raises StartError if the job cannot get a coordinator.
    """
    while (order := succession.look(now)) is not None:
        match order:
            case Kill():
                kill()
            case Start(term):
                start(term)
            case GiveUp(why):
                raise StartError(why)
