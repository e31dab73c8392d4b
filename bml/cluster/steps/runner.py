"""The interface of both data planes, `WireSteps` and `SharedSteps`, and the factory that chooses one.

A step runner brings the training thread's contribution to the server's core, carries out the instructions
that concern the step's memory, and gives out the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from bml.cluster.spec.job import Contact, JobSpec
from bml.cluster.steps.host import Handlers, StepHost
from bml.cluster.steps.shared import SharedSteps
from bml.cluster.steps.wire import WireSteps
from bml.protocol.record.setup import planner
from bml.protocol.server import events as ev
from bml.protocol.server.core import Planner
from bml.protocol.step.workspace import Array, Padded, Workspace
from bml.sharedmem import StatusPages
from bml.train.communicator import Outcome


class StepRunner(Protocol):
    """Runs the steps of one server. Errors that end the job are raised by `sync`."""

    handlers: Handlers
    """For each kind of instruction that concerns the memory of a step."""
    workspace: Workspace | None
    """The memory of the step that is under way; None where no frame carries data."""

    @property
    def nbytes_copied(self) -> int:
        """Contributions that had to be copied into memory that others read, in bytes."""
        ...

    def sync(
        self, submit: ev.Submit, contribution: Array | Padded, op: str, shared: bool
    ) -> Outcome | ev.Replay:
        """Bring a contribution, in the training thread; returns its result, or why there is none.

        `Replay` stands for the result of a step that was followed. `shared` allows that the result lies in
        memory that other servers read too.
        """
        ...

    def open(self, contacts: Mapping[int, Contact]) -> None:
        """The contacts of all servers of the job are known; the loop does not run yet."""
        ...

    def admit(self, contacts: Mapping[int, Contact]) -> None:
        """A view of these members is in force."""
        ...

    def waits_for(self) -> str:
        """The servers that the calling thread of a step waits for, in words; empty if there are none."""
        ...

    def close(self) -> None:
        """Free all memory; the job is over for this server."""
        ...


def make_runner(spec: JobSpec, host: StepHost, pages: StatusPages | None) -> StepRunner:
    """The runner of a server: in shared memory if it shows `pages` there, else over its links."""
    if pages is None:
        return WireSteps(host)
    return SharedSteps(host, pages, give_up_s=spec.timeouts().orphan_s)


def programs(spec: JobSpec, shares_memory: bool) -> Planner:
    """The function that plans, for a fabric with its failures and a server, the programs of that server."""
    return planner(spec.algorithm, spec.constants, shares_memory)
