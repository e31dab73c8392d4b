"""Where a page has its job from: a job of this process, or one that another launcher runs."""

from __future__ import annotations

from typing import Any, Protocol

from bml.cluster.launcher import jobsocket
from bml.errors import BmlError


class Source(Protocol):
    """A job that is shown. Any threads may call both methods, also at the same time."""

    def status(self) -> dict[str, Any]:
        """See bml.Job.status. Raises BmlError if the job does not answer."""
        ...

    def inject(self, spec: str) -> dict[str, Any]:
        """See bml.Job.inject."""
        ...


class OtherJob:
    """A job of another process of this user, over its socket. `name`: None is the only one that runs."""

    def __init__(self, name: str | None):
        self.name = jobsocket.find(name).stem

    def status(self) -> dict[str, Any]:
        """See Source."""
        return jobsocket.call(self.name, {"do": "status"})

    def inject(self, spec: str) -> dict[str, Any]:
        """See Source."""
        return jobsocket.call(self.name, {"do": "inject", "fault": spec})

    def outcome(self) -> dict[str, Any]:
        """Wait for the end of the job; returns how it has ended (see bml.Job.outcome)."""
        try:
            while not (outcome := jobsocket.call(self.name, {"do": "outcome"})):
                pass
        except BmlError as error:
            text = f"its launcher does not answer any more, so its result is not known here ({error})"
            return {"ended_well": False, "kind": type(error).__name__, "text": text, "steps": 0}
        return outcome
