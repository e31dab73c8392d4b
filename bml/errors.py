"""The errors that end a job. A UsageError is a mistake of the user, a FabricError is damage."""

from __future__ import annotations

from bml.topology.errors import BmlError, FabricError, InvariantError, UsageError

__all__ = [
    "BmlError",
    "ContributorLost",
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
    """Fewer servers are left than may go on (`min_servers`); the survivors have the last committed state."""


class Evicted(FabricError):
    """This server is not in the current view any more. Only a new incarnation of it can join."""


class StartError(FabricError):
    """Not all servers appeared within `start_s`."""


class ContributorLost(FabricError):
    """The server whose values a collective needs was lost before the step; the session can go on."""


class StateMismatch(BmlError):
    """The job ended, but its servers hold different parameters, or count different samples as used.

    On a server that joins: the others hold different states, of which none can be sent to it.
    """


class StepMismatch(UsageError):
    """Two servers called different collectives, or with arrays of different shape or dtype."""


class SessionBroken(UsageError):
    """An exception has left a call of this session; it can make no other, as the step may be committed."""


class TooSlow(FabricError):
    """A server that joins cannot catch up with the others: they commit steps faster than it applies them."""


class TrainingError(BmlError):
    """A training function raised. The text names the server and holds the traceback."""

    def __init__(self, text: str, server: int = -1):
        super().__init__(text)
        self.server = server
        """Id of the server on which it raised; -1 if that is not known."""


def job_error(kind: str, text: str, server: int = -1) -> BmlError:
    """Make the error for an Abort message of this kind (see messages.ABORT_KINDS)."""
    if kind == "training":
        return TrainingError(text, server)
    kinds: dict[str, type[BmlError]] = {
        "too-few": TooFewServers,
        "start": StartError,
    }
    return kinds.get(kind, BmlError)(text)
