"""Where a page has its job from: a job of this process, or one that another launcher runs."""

from __future__ import annotations

import time
from typing import Any, Protocol

from bml.cluster.launcher import jobsocket
from bml.errors import BmlError

_AGAIN_S = 1.0
"""After so long a launcher that did not answer is asked again."""


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
        while True:
            try:
                if outcome := jobsocket.call(self.name, {"do": "outcome"}):
                    return outcome
            except BmlError as error:
                if not self._is_there():
                    text = f"its launcher has gone, so its result is not known here ({error})"
                    return {"ended_well": False, "kind": type(error).__name__, "text": text, "steps": 0}
                time.sleep(_AGAIN_S)

    def _is_there(self) -> bool:
        """Whether its launcher lives: it may be stopped, or too busy to answer."""
        try:
            jobsocket.find(self.name)
        except BmlError:
            return False
        return True
