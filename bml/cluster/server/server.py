"""A server as its training function sees it: it brings contributions and gets results.

The function runs in a thread of its own, often the process's main one; sockets, memory and the protocol
belong to another, the loop's (bml.cluster.server.loop). The two meet in `sync` alone: a contribution goes
in, and its result comes out, or the word that it is to be prepared again for a new view.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bml.cluster.server.loop import ServerLoop
from bml.cluster.server.status import link_stats, status, view_records
from bml.cluster.spec.job import Contacts, JobSpec, Request
from bml.cluster.spec.trace import ServerTrace
from bml.faults import Fault
from bml.protocol.server import events as ev
from bml.protocol.server.transfer import SegmentedBytes
from bml.protocol.step.workspace import Array
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call
from bml.topology.errors import BmlError, UsageError
from bml.train.communicator import Committed, Outcome

_YIELDS = 60
"""How often to look again before sleeping for what is usually there sooner than one can be woken."""
_SMALL_NBYTES = 64 << 10
"""Of a longer vector, over wires, most is worth sleeping for."""


class Server:
    """One server of a job on this machine. `contact` is known at once; `start` needs everybody's.

    `nics` are this server's own addresses, one per level. `incarnation` is the number of a server that joins
    a running job, None: it is one of those with which the job begins. `apply_to_fabric`
    applies a fault to real cables and returns when it is in force; None where there are no real cables.
    """

    def __init__(
        self,
        spec: JobSpec,
        server: int,
        nics: Sequence[str],
        control_host: str = "127.0.0.1",
        apply_to_fabric: Callable[[Fault], None] | None = None,
        incarnation: int | None = None,
    ):
        self.server = server
        self._spec = spec
        self._loop = ServerLoop(spec, server, nics, control_host, apply_to_fabric, incarnation)
        self._meeting, self._handover = self._loop.meeting, self._loop.handover
        self.contact = self._loop.contact
        # This thread adds, too, and an overflow is a result, whatever the user has set. (np.errstate would
        # cost ten times as much in every step.)
        self._quiet = contextvars.copy_context()
        self._quiet.run(np.seterr, all="ignore")
        self._training_thread = 0
        self._replays = False

    def start(self, contacts: Contacts) -> None:
        """Start the loop, in the training thread; the coordinator may call from now on."""
        self._training_thread = threading.get_ident()
        self._loop.start(contacts)

    def wait_for_view(self) -> None:
        """Wait until the first view is in force; raises the error that ended the job before."""
        self._meeting.in_force.wait()
        if self.error:
            raise self.error

    # --- steps -----------------------------------------------------------------------------------

    @property
    def view(self) -> msg.View:
        """The view in force. Raises UsageError on a joiner that has not been let in."""
        view = self._loop.core.view
        if view is None:
            raise UsageError(
                f"server {self.server} joins a running job: it is in no view, and can call nothing that "
                "others take part in, before its first session.batches or session.steps begins"
            )
        return view

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers with which the job began, lost ones too."""
        return self._spec.servers

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in memory that the transport sends from without a copy."""
        return self._loop.memory.empty(shape, dtype)

    def sync(
        self, epoch: int, contribution: Array, op: str, text: str, signature: int, shared: bool = False
    ) -> Outcome:
        """Bring this server's contribution to the next step, prepared for view `epoch`.

        `contribution` is one-dimensional and contiguous, and is only read. Returns the result once the
        step is committed by everybody, or says for which view to prepare it again; `shared` allows that it
        lies in memory that other servers read too. Raises the error that ends the job.
        """
        meeting, handover = self._meeting, self._handover
        if self._replays:
            handover.wait_for_next()  # what is brought is none: it must not be taken for a contribution
        call = Call(op, contribution.dtype.str, contribution.size, text)
        submit = ev.Submit(handover.step, epoch, call, signature)
        meeting.enter(contribution, op)
        if self._loop.direct is not None:
            reply = self._quiet.run(self._loop.direct.sync, submit, contribution, op, shared)
        else:
            self._plan(contribution.nbytes)
            reply = self._quiet.run(self._answer, submit, self._yields(contribution.nbytes))
        meeting.leave()
        if isinstance(reply, ev.Replay):
            reply = handover.kept(reply.step)
        if isinstance(reply, Committed):
            handover.step = reply.step + 1
        return reply

    def _yields(self, nbytes: int) -> int:
        """How often to look again: on one host always, but never beside a training thread that computes."""
        if self._beside():
            return 0
        return _YIELDS if nbytes <= _SMALL_NBYTES or self._loop.one_host else 0

    def _beside(self) -> bool:
        """Whether the training thread computes while this one waits."""
        return threading.get_ident() != self._training_thread

    def _answer(self, event: ev.Event, yields: int = 0) -> Outcome | ev.Replay:
        while True:
            reply = self._loop.answer(event, yields, self._beside())
            if isinstance(reply, Exception):
                raise reply
            assert not isinstance(reply, ev.FetchResult), "over shared memory DirectSync fetches it"
            if not isinstance(reply, ev.Prepare):
                return reply
            self._plan(reply.nbytes)
            event = ev.Prepared(reply.epoch)

    def _plan(self, nbytes: int) -> None:
        """Plan in the training thread, so that the loop's goes on sending heartbeats.

        If another view comes in force meanwhile, the step is tried again.
        """
        programs = self._loop.core.programs
        if programs:
            programs.for_nbytes(nbytes)

    # --- joining and leaving ---------------------------------------------------------------------

    def joined(self) -> memoryview | None:
        """The training state, if this server joined a running job and needs one now; waits until it is here.

        It is not let in before, so that nobody keeps results for it while it imports and loads its data.
        Raises the error that ended the job before, FabricError if the state was damaged on its way.
        """
        state: memoryview | None = None
        while self._handover.needs_state:
            self._loop.request(ev.Ready())
            state = self._handover.take()
        return state

    @property
    def replays(self) -> bool:
        """See Session.replays."""
        return self._replays

    def draw_level(self) -> None:
        """See Communicator; the core decides."""
        handover = self._handover
        if not handover.joins or self.contributes:
            self._replays = False
            return
        if self.error:
            raise self.error
        self._loop.request(handover.arrive())
        self._replays = handover.replays()
        if self._replays:
            handover.wait_for_next()

    def boundary(self, state: Callable[[], SegmentedBytes]) -> None:
        """Between two steps: joiners are given `state()`, if there are any.

        Raises the error that ends the job here if this server was asked to leave.
        """
        if self._handover.leaves:
            self._answer(ev.Go(self._handover.leaves))
        if self._handover.first_boundary():
            self._loop.request(ev.CanSendState())
        given = self._handover.copy_state(self._loop.core.outgoing_state, state)
        if given is not None:
            self._loop.request(given)

    @property
    def joins(self) -> bool:
        """See Communicator."""
        return self._handover.joins

    @property
    def contributes(self) -> bool:
        """Whether it is no joiner, or one that is in."""
        view = self._loop.core.view
        joins = self._handover.joins
        return not joins or (view is not None and self.server in view.contributors)

    def leave(self, why: str) -> None:
        """Ask this server to go: its training function stops before the next step, and no work is lost."""
        self._handover.ask_to_leave(why)

    @property
    def leaves(self) -> bool:
        """Whether it was asked to go."""
        return bool(self._handover.leaves)

    # --- the end, and the report -----------------------------------------------------------------

    def end(self, outcome: str, error: str = "") -> None:
        """Say that the training function ended, then serve the others until all are done."""
        self._loop.request(ev.Ended(outcome, error))
        self._loop.join()
        self._loop.deferral.close()

    @property
    def error(self) -> BmlError | None:
        """What ended the job early, if anything did."""
        return self._meeting.error

    @property
    def steps(self) -> int:
        """How many results the training function was given."""
        return self._meeting.steps

    @property
    def commit_at_s(self) -> Sequence[float]:
        """When the last ones were given to it, by the clock of time.monotonic."""
        return self._meeting.commit_at_s

    def view_records(self) -> list[dict[str, object]]:
        """The views this server lived through, for the report."""
        return view_records(self._loop.core)

    @property
    def struck(self) -> tuple[str, ...]:
        """The faults whose time has come here, as texts."""
        return tuple(self._loop.injection.struck)

    def link_stats(self) -> dict[str, dict[str, int]]:
        """Counters per "peer/level"."""
        return link_stats(self._loop.transport)

    def trace(self) -> ServerTrace | None:
        """What it did when, if that was to be recorded; to be asked after `end`."""
        return None if self._loop.trace is None else self._loop.trace.taken()

    @property
    def nbytes_copied(self) -> int:
        """Contributions that lay outside of shared memory and were copied into it, in bytes."""
        return self._loop.nbytes_copied

    # --- for whoever looks at it from outside ----------------------------------------------------

    def answer(self, request: Request, reply: Callable[[dict[str, Any]], None]) -> None:
        """Answer a request of any thread, in the loop's; silence when the loop does not run.

        "status": where this server stands (see bml.cluster.server.status). "inject": `{"done": what it will
        do to itself}`, said before it is done, `""` if it is no matter of this server's; `{"error": why}`.
        """
        loop = self._loop

        def carry_out() -> None:
            try:
                what, argument = request
                now = time.monotonic()
                if what == "inject":
                    reply({"done": loop.injection.add(argument, loop.core, now)})
                else:
                    reply(status(loop, now))
            except BmlError as error:
                reply({"error": str(error)})

        loop.request(carry_out)
