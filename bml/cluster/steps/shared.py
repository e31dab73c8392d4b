"""Steps in shared memory: the training thread itself reads the others' contributions and adds them.

`direct.DirectSync` does so. This module is its place in the server: which instructions of the core go to it,
and, on a server that joins, the thread that follows steps (`following.Follower`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from bml.cluster.spec.job import Contact
from bml.cluster.steps.direct import DirectSync
from bml.cluster.steps.following import Follower
from bml.cluster.steps.host import Handlers, StepHost
from bml.protocol.server import events as ev
from bml.protocol.step.direct import Post, Quit, Stage, Sum
from bml.protocol.step.workspace import Array, Padded, Workspace
from bml.sharedmem import Reduction, SharedPool, StatusPages
from bml.topology.errors import BmlError
from bml.train.communicator import Committed, Outcome

_NO_RESULT: Array = np.empty(0, np.uint8)
"""DirectSync knows where the result lies."""


class SharedSteps:
    """The `StepRunner` in shared memory; see bml.cluster.steps.runner.

    A step that goes wrong because memory cannot be read waits `give_up_s` seconds for the view or the error
    that explains it.
    """

    def __init__(self, host: StepHost, pages: StatusPages, give_up_s: float):
        assert isinstance(host.memory, SharedPool)
        self.workspace: Workspace | None = None
        self.handlers: Handlers = {
            Post: self._post,
            Sum: self._add,
            Quit: self._quit,
            ev.Open: self._open,
            ev.ContributeNeutral: self._called,
            ev.Commit: self._commit,
            ev.FetchResult: self._fetch_result,
            ev.BufferResult: self._keep,
            ev.DiscardResult: self._skip,
        }
        self._core = host.core
        self._faults = host.faults
        self._mailbox = host.mailbox
        self._handover = host.handover
        self._pages = pages
        self._reduction = Reduction(pages, host.memory)
        self._direct = DirectSync(pages, self._reduction, host, give_up_s)
        self._follower = Follower(self._direct, host.handover.keep, self._cannot_follow)

    @property
    def nbytes_copied(self) -> int:
        """See StepRunner."""
        return self._reduction.nbytes_copied

    def sync(
        self, submit: ev.Submit, contribution: Array | Padded, op: str, shared: bool
    ) -> Outcome | ev.Replay:
        """See StepRunner."""
        return self._direct.sync(submit, contribution, op, shared)

    def open(self, contacts: Mapping[int, Contact]) -> None:
        """See StepRunner."""
        self._pages.open({server: contact.status_page for server, contact in contacts.items()})

    def admit(self, contacts: Mapping[int, Contact]) -> None:
        """See StepRunner."""
        self._pages.admit({server: contact.status_page for server, contact in contacts.items()})

    def waits_for(self) -> str:
        """See StepRunner."""
        return self._direct.waits_for()

    def close(self) -> None:
        """See StepRunner."""
        self._follower.close()
        self._pages.close()
        self._reduction.close()

    def _cannot_follow(self, error: BmlError) -> None:
        """The training function of a joiner must not wait for results that will not come; any thread."""
        self._mailbox.throw(error)
        self._handover.fail(error)

    # --- instructions, under the guard -----------------------------------------------------------

    def _post(self, instruction: Post) -> None:
        if instruction.stage is Stage.COMPLETE and self._faults.pending:
            self._faults.before_token(instruction.step, self._core, time.monotonic())
        self._direct.post(instruction)

    def _add(self, instruction: Sum) -> None:
        self._direct.add(instruction)

    def _quit(self, instruction: Quit) -> None:
        self._direct.quit(instruction)

    def _open(self, instruction: ev.Open) -> None:
        """Nothing: the thread that said Submit, or Follow, has brought the contribution."""

    def _called(self, instruction: ev.ContributeNeutral) -> None:
        self._follower.called(instruction.submit)

    def _commit(self, done: ev.Commit) -> None:
        self._mailbox.give(Committed(done.step, done.epoch, done.contributors, _NO_RESULT))

    def _fetch_result(self, instruction: ev.FetchResult) -> None:
        if instruction.follows:
            self._direct.keep(instruction)
        else:
            self._mailbox.replies.put(instruction)

    def _keep(self, done: ev.BufferResult) -> None:
        self._direct.keep(Committed(done.step, done.epoch, done.contributors, _NO_RESULT))

    def _skip(self, instruction: ev.DiscardResult) -> None:
        """Nothing: a followed step that no joiner asks for has its result in memory of the others."""
