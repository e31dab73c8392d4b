"""Steps over links: frames move in the thread that polls, which is the training thread while it waits."""

from __future__ import annotations

from collections.abc import Mapping

from bml.cluster.spec.job import Contact
from bml.cluster.spec.trace import TracedWorkspace
from bml.cluster.steps.host import Handlers, StepHost
from bml.io.spin import NO_SPIN, Spin
from bml.protocol.server import events as ev
from bml.protocol.step.dataflow import Reduce
from bml.protocol.step.workspace import Array, Padded, Workspace, written
from bml.protocol.wire.call import neutral
from bml.train.communicator import Committed, Outcome

_SHORT = Spin(60, only_idle=False)
"""For a reply that usually comes sooner than a thread is woken."""
_LONG = Spin(16, only_idle=True)
"""For a frame of a long vector on one host: it takes longer to come, and whoever sends it needs a core."""
_LONG_NBYTES = 1 << 20
_SMALL_NBYTES = 64 << 10
"""Most of the time of a longer vector, over wires between hosts, is worth sleeping for."""


class WireSteps:
    """The `StepRunner` over the links of a transport; see bml.cluster.steps.runner."""

    nbytes_copied = 0

    def __init__(self, host: StepHost):
        self.workspace: Workspace | None = None
        self.handlers: Handlers = {
            Reduce: self._reduce,
            ev.Open: self._open,
            ev.Commit: self._commit,
            ev.BufferResult: self._keep,
            ev.DiscardResult: self._skip,
        }
        self._core = host.core
        self._memory = host.memory
        self._mailbox = host.mailbox
        self._handover = host.handover
        self._answer = host.answer
        self._one_host = host.one_host
        self._trace = host.trace

    def sync(
        self, submit: ev.Submit, contribution: Array | Padded, op: str, shared: bool
    ) -> Outcome | ev.Replay:
        """See StepRunner."""
        vector = written(contribution)
        self._plan(vector.nbytes)
        spin = self._spin(vector.nbytes)
        reply = self._answer(submit, spin)
        while isinstance(reply, ev.Prepare):
            self._plan(reply.nbytes)
            reply = self._answer(ev.Prepared(reply.epoch), spin)
        assert not isinstance(reply, ev.FetchResult | Exception), "it is of shared memory, or was raised"
        return reply

    def open(self, contacts: Mapping[int, Contact]) -> None:
        """See StepRunner; the links are the transport's."""

    def admit(self, contacts: Mapping[int, Contact]) -> None:
        """See StepRunner; the links are the transport's."""

    def waits_for(self) -> str:
        """See StepRunner; the core knows it."""
        return ""

    def close(self) -> None:
        """See StepRunner."""
        self.workspace = None

    def _spin(self, nbytes: int) -> Spin:
        if nbytes > _SMALL_NBYTES and not self._one_host():
            return NO_SPIN
        return _SHORT if nbytes < _LONG_NBYTES else _LONG

    def _plan(self, nbytes: int) -> None:
        """Plan in the training thread, so that the loop's goes on sending heartbeats.

        If another view comes in force meanwhile, the step is tried again.
        """
        programs = self._core.programs
        if programs:
            programs.for_nbytes(nbytes)

    # --- instructions, in the loop's thread or in one that polls -----------------------------------

    def _reduce(self, instruction: Reduce) -> None:
        assert self.workspace is not None
        self.workspace.reduce(instruction)

    def _open(self, instruction: ev.Open) -> None:
        if self._trace is not None:
            self._trace.opened(instruction.step)
        scratch_elements = instruction.scratch_elements
        if instruction.left:
            assert self.workspace is not None
            self.workspace = self.workspace.resume(instruction.left, scratch_elements)
            return
        if instruction.follows is not None:
            vector, op = neutral(instruction.follows), instruction.follows.op
        else:
            assert self._mailbox.contribution is not None
            vector, op = self._mailbox.contribution
        self.workspace = None  # the memory of a try that failed serves the next
        if self._trace is None:
            self.workspace = Workspace(vector, scratch_elements, op, self._memory.empty)
        else:
            self.workspace = TracedWorkspace(self._trace, vector, scratch_elements, op, self._memory.empty)

    def _commit(self, instruction: ev.Commit) -> None:
        self._mailbox.commit(self._committed(instruction))

    def _keep(self, instruction: ev.BufferResult) -> None:
        self._handover.keep(self._committed(instruction))

    def _skip(self, instruction: ev.DiscardResult) -> None:
        self.workspace = None
        if self._trace is not None:
            self._trace.ended("committed")

    def _committed(self, done: ev.Commit | ev.BufferResult) -> Committed:
        """The result of the step that has ended."""
        assert self.workspace is not None
        result, self.workspace = self.workspace.result, None
        if self._trace is not None:
            self._trace.ended("committed")
        return Committed(done.step, done.epoch, done.contributors, result)
