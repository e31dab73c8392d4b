"""Jobs of the modelled runtime: the real session on every server, in threads, with deaths and joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bml.errors import Evicted
from bml.sim.programs.faults import Dead, Faults
from bml.sim.programs.running import run


def job(train: Callable[[Any], Any], n_servers: int = 4, faults: Faults | None = None) -> dict[int, Any]:
    """What each server's function returned, or its error; a dead server has none, unless it joined again.

    Nor has a joiner that comes when the others have ended, as it may where threads get little time.
    """
    ends: dict[int, Any] = {}

    def note(communicator: Any, session: Any, value: Any, error: BaseException | None) -> None:
        too_late = communicator.joins and isinstance(error, Evicted) and "the others" in str(error)
        if not isinstance(error, Dead) and not too_late:
            ends[communicator.server] = value if error is None else error

    group = run(train, range(n_servers), faults or Faults(), note)
    assert not group.violations
    return ends


def results(train: Callable[[Any], Any], n_servers: int = 4, faults: Faults | None = None) -> dict[int, Any]:
    """The values of all servers that lived; an error of one of them is raised."""
    ends = job(train, n_servers, faults)
    for end in ends.values():
        if isinstance(end, BaseException):
            raise end
    return ends
