"""Errors that end a job, each with the one who can act on it; all are `BmlError`s."""

from __future__ import annotations

from bml.topology.errors import BmlError, FabricError, InvariantError, UsageError

__all__ = [
    "BmlError",
    "Evicted",
    "FabricError",
    "InvariantError",
    "SessionBroken",
    "StartError",
    "StateMismatch",
    "StepMismatch",
    "TooFewServers",
    "TooSlow",
    "TrainingError",
    "UsageError",
    "job_error",
]


class TooFewServers(FabricError):
    """Fewer servers are left than may go on; the state of the survivors is intact."""


class Evicted(FabricError):
    """This server is not in the current view any more; it must rejoin before it can go on."""


class StartError(FabricError):
    """Not all servers appeared at start-up."""


class StateMismatch(BmlError):
    """The job ended, but its servers hold different parameters, or count different samples as used.

    On a server that joins: the others hold different states, of which none can be given to it.
    """


class StepMismatch(UsageError):
    """Two servers called different collectives, or with arrays of different shape or dtype."""


class SessionBroken(UsageError):
    """An exception left a call of the session, which can make no other: its step may be committed."""


class TooSlow(FabricError):
    """A server that joins cannot catch up with the others: they commit steps faster than it applies them."""


class TrainingError(BmlError):
    """A training function raised; `server` says where, the text carries its traceback."""

    def __init__(self, text: str, server: int = -1):
        super().__init__(text)
        self.server = server


def job_error(kind: str, text: str, server: int = -1) -> BmlError:
    """The error that an Abort message stands for (see messages.ABORT_KINDS)."""
    if kind == "training":
        return TrainingError(text, server)
    kinds: dict[str, type[BmlError]] = {
        "too-few": TooFewServers,
        "start": StartError,
    }
    return kinds.get(kind, BmlError)(text)
