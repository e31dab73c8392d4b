"""A server as its training function sees it: the function brings contributions and gets results.

The function runs in a thread of its own, often the process's main one; sockets, memory and the protocol
belong to another, the loop's (bml.cluster.server.loop). The two meet in `sync` alone: a contribution goes
in, and its result comes out, or the word that it is to be prepared again for a new view.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bml.cluster.server.assembly import Assembly
from bml.cluster.server.peer_lines import OnEnd, OnMessage, PeerLines
from bml.cluster.server.status import Membership, answer, link_stats, transport_used, view_records
from bml.cluster.spec.job import Contacts, JobSpec, Request
from bml.cluster.spec.trace import ServerTrace
from bml.faults import Fault
from bml.protocol.coordinator.election import Seen
from bml.protocol.server import events as ev
from bml.protocol.server.transfer import SegmentedBytes
from bml.protocol.step.workspace import Array, Padded, vector_of
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call
from bml.topology.errors import BmlError, UsageError
from bml.train.balancing.throughput import SizeSummary, Throughput
from bml.train.communicator import Committed, Outcome
from bml.train.keeping.settings import Keeping

_LOG = logging.getLogger(__name__)

_DEPARTS_S = 0.5
"""How long a server that departs waits for a view without it, in seconds; then it goes without one."""


class Server:
    """One server of a job on this machine. `contact` is known at once; `start` needs those of all servers.

    `nics` are this server's own addresses, one per level. `incarnation` is the number of a server that joins
    a running job, None: the job begins with this server. `apply_to_fabric` applies a fault to real cables and
    returns when it is in force; None where there are no real cables. `on_line` is called, in the thread that
    polls, when a coordinator has said something or has hung up.
    """

    def __init__(
        self,
        spec: JobSpec,
        server: int,
        nics: Sequence[str],
        control_host: str = "127.0.0.1",
        apply_to_fabric: Callable[[Fault], None] | None = None,
        incarnation: int | None = None,
        on_line: Callable[[], None] = lambda: None,
    ):
        self.server = server
        self._spec = spec
        self._servers = spec.servers
        self._shell = shell = Assembly(
            spec, server, nics, control_host, apply_to_fabric, incarnation, on_line
        )
        self._mailbox, self._handover = shell.mailbox, shell.handover
        self.job = spec.job
        self.contact = shell.peers.contact
        self.slowdown = shell.slowdown
        self.piece_nbytes = spec.piece_nbytes()
        # This thread adds, too, and an overflow is a result, also if the user has set it to raise.
        # (np.errstate would cost ten times as much in every step.)
        self._quiet = contextvars.copy_context()
        self._quiet.run(np.seterr, all="ignore")
        self._replays = False

    def start(self, contacts: Contacts) -> None:
        """Start the loop, in the training thread; the coordinator may call from now on."""
        if not self.joins:  # it may have been started before it was known who comes in time
            self._servers = tuple(each for each in self._servers if each in contacts)
        self._shell.start(contacts)

    def discard(self) -> None:
        """Free the sockets and memory of a server that cannot be started; it is over."""
        self._mailbox.over()
        self._shell.close()

    def wait_for_view(self) -> None:
        """Wait until the first view is in force; raises the error that ended the job before."""
        self._mailbox.in_force.wait()
        if self.error:
            raise self.error

    # --- steps -----------------------------------------------------------------------------------

    @property
    def view(self) -> msg.View:
        """The view in force. Raises UsageError on a joiner that has not been let in."""
        view = self._shell.core.view
        if view is None:
            raise UsageError(
                f"server {self.server} joins a running job: it is in no view, and can call nothing that "
                "others take part in, before its first session.batches or session.steps begins"
            )
        return view

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers with which the job began, lost ones too; the same on all of them."""
        return self._servers

    @property
    def n_servers(self) -> int:
        """See Session.n_servers."""
        return self._spec.parsed_fabric().n_servers

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in memory that the transport sends from without a copy."""
        return self._shell.opened.memory.empty(shape, dtype)

    def sync(
        self,
        epoch: int,
        contribution: Array | Padded,
        op: str,
        text: str,
        signature: int,
        shared: bool = False,
    ) -> Outcome:
        """Bring this server's contribution to the next step, prepared for view `epoch`.

        `contribution` is one-dimensional and contiguous, and is only read; zeros may be written into a padded
        one. Returns the result once the step is committed by all servers, or says for which view to prepare
        it again; `shared` allows that it lies in memory that other servers read too. Raises the error that
        ends the job.
        """
        mailbox, handover = self._mailbox, self._handover
        if self._replays:
            handover.wait_for_next()  # the vector must not be taken for a contribution
        vector = vector_of(contribution)
        call = Call(op, vector.dtype.str, vector.size, text)
        submit = ev.Submit(handover.step, epoch, call, signature)
        mailbox.enter(vector, op)
        reply = self._quiet.run(self._shell.runner.sync, submit, contribution, op, shared)
        mailbox.leave()
        if isinstance(reply, ev.Replay):
            reply = handover.kept(reply.step)
        if isinstance(reply, Committed):
            handover.step = reply.step + 1
        return reply

    def clock(self) -> float:
        """See Communicator."""
        return time.monotonic()

    def show_shares(self, shares: dict[str, Any] | None, news: str) -> None:
        """See Communicator."""
        self._shell.shares = shares
        if news:
            _LOG.warning("%s", news)

    def show_checkpoints(self, shown: Callable[[], dict[str, Any]]) -> None:
        """See Communicator."""
        self._shell.checkpoints = shown

    @property
    def checkpoints(self) -> dict[str, Any] | None:
        """What is known of checkpoints; None if the job makes none."""
        return self._shell.checkpoints() if self._shell.checkpoints else None

    @property
    def keeping(self) -> Keeping:
        """Which checkpoints the launcher wants, and with which one this job goes on."""
        return self._spec.keeping

    def show_throughput(self, throughput: Throughput) -> None:
        """Show the throughput of a session in the status and the report."""
        self._shell.throughput = throughput

    @property
    def sizes(self) -> dict[int, SizeSummary]:
        """The steps by the number of servers that contributed."""
        return self._shell.sizes()

    @property
    def shares(self) -> dict[str, Any] | None:
        """How batches are shared, if shares are not equal."""
        return self._shell.shares

    # --- joining and leaving ---------------------------------------------------------------------

    def joined(self) -> memoryview | None:
        """The training state, if this server joined a running job and needs one now; waits until it is here.

        It is not let in before, so that no server keeps results for it while it imports and loads its data.
        Raises the error that ended the job before, FabricError if the state was damaged on its way.
        """
        state: memoryview | None = None
        while self._handover.needs_state:
            self._shell.request(ev.Ready())
            state = self._handover.take()
        return state

    @property
    def replays(self) -> bool:
        """See Session.replays."""
        return self._replays

    def begin_iteration(self) -> None:
        """See Communicator; the core decides."""
        handover = self._handover
        if not handover.joins or self.contributes:
            self._replays = False
            return
        if self.error:
            raise self.error
        self._shell.request(handover.arrive())
        self._replays = handover.replays()
        if self._replays:
            handover.wait_for_next()

    def boundary(self, state: Callable[[], SegmentedBytes]) -> None:
        """Between two steps: joiners are given `state()`, if there are any.

        Raises the error that ends the job here if this server was asked to leave.
        """
        if self._handover.leaves:
            self._shell.loop.answer(ev.Leaving(self._handover.leaves))
        if self._handover.first_boundary():
            self._shell.request(ev.CanSendState())
        given = self._handover.copy_state(self._shell.core.outgoing_state, state)
        if given is not None:
            self._shell.request(given)

    @property
    def joins(self) -> bool:
        """See Communicator."""
        return self._handover.joins

    @property
    def contributes(self) -> bool:
        """Whether it is no joiner, or one that is in."""
        view = self._shell.core.view
        joins = self._handover.joins
        return not joins or (view is not None and self.server in view.contributors)

    def leave(self, why: str) -> None:
        """Ask this server to go: its training function stops before the next step, and no work is lost."""
        self._handover.ask_to_leave(why)

    def abandon(self, why: str) -> None:
        """Ask this server to go, and to wait for no coordinator: nobody is left that would start another."""
        self.leave(why)
        self._shell.request(ev.Abandoned())

    def let_go(self) -> None:
        """End this server, which was in no view: all others have ended. Calls raise Evicted."""
        self._shell.request(ev.Alone())

    @property
    def leaves(self) -> bool:
        """Whether it was asked to go."""
        return bool(self._handover.leaves)

    # --- the end, and the report -----------------------------------------------------------------

    def end(self, outcome: str, error: str = "") -> None:
        """Say that the training function ended, then serve the others until all are done."""
        self.begin_end(outcome, error)
        self.wait_for_end()

    def begin_end(self, outcome: str, error: str = "") -> None:
        """Say that the training function ended, in its thread."""
        self._shell.request(ev.Ended(outcome, error))
        self._mailbox.deferral.close()

    def wait_for_end(self) -> None:
        """Serve the others until all are done; any thread may wait."""
        self._shell.loop.join()

    @property
    def error(self) -> BmlError | None:
        """The error that ended the job early; None if there is none."""
        return self._mailbox.error

    @property
    def steps(self) -> int:
        """How many results the training function was given."""
        return self._mailbox.steps

    @property
    def commit_at_s(self) -> Sequence[float]:
        """When the last ones were given to it, by the clock of time.monotonic."""
        return self._mailbox.commit_at_s

    def view_records(self) -> list[dict[str, object]]:
        """The views this server lived through, for the report."""
        return view_records(self._shell.core, self._shell.forecast.looked().of_view)

    @property
    def struck(self) -> tuple[str, ...]:
        """The faults that were due on this server, as texts."""
        return tuple(self._shell.injection.struck)

    def traffic(self) -> dict[str, dict[str, Any]]:
        """Which transport it uses, and over what; and under `links` counters per "peer/level"."""
        opened = self._shell.opened
        return {"transport": transport_used(opened), "links": link_stats(opened.transport)}

    def trace(self) -> ServerTrace | None:
        """The recorded timeline, if one was asked for; to be read after `end`."""
        return None if self._shell.trace is None else self._shell.trace.taken()

    def recording(self, wanted: bool) -> bytes:
        """What the flight recorder holds, packed, if it is wanted or the job asks for it; after `end`."""
        return self._shell.take_recording("end of the job")() if wanted or self._spec.record else b""

    @property
    def nbytes_copied(self) -> int:
        """Contributions that lay outside of shared memory and were copied into it, in bytes."""
        return self._shell.runner.nbytes_copied

    # --- a group without a launcher ------------------------------------------------------------------

    def membership(self) -> Membership:
        """Return what this server knows of its coordinator and of the others; any thread may ask."""
        shell = self._shell
        with shell.poller.guard:
            core, view = shell.core, shell.core.view
            members = None if view is None else view.members
            seen = Seen(
                core.coordinator_term,
                shell.line.is_open,
                shell.n_told,
                members,
                core.suspected_peers,
                core.unanswered,
            )
            return Membership(seen, dict(shell.peers.contacts), dict(shell.peers.incarnations))

    @property
    def is_over(self) -> bool:
        """Whether the job is over for this server, well or with an error."""
        return self._mailbox.stopped

    def depart(self, why: str) -> None:
        """Leave the job at once, whatever the training thread is doing; the others go on without this server.

        They are told, so that none of them waits for it. No call is possible any more.
        """
        shell, left = self._shell, BmlError(f"server {self.server} has left the job: {why}")
        shell.request(ev.Leaving(why))
        self._mailbox.out.wait(_DEPARTS_S)

        def go() -> None:
            shell.execution.stop(left)
            shell.execution.user_ended()

        shell.request(go)
        shell.loop.join()
        self._mailbox.deferral.close()

    def peer_lines(self, on_message: OnMessage, on_unsent: OnEnd, on_cut: OnEnd) -> PeerLines:
        """Make channels to the other servers beside the steps; to be called before `start`."""
        return PeerLines(self._shell, self.server, self._spec, on_message, on_unsent, on_cut)

    def call(self, action: Callable[[], None]) -> None:
        """Call something in the thread that polls; any thread may ask. It is not called after the end."""
        self._shell.request(action)

    # --- requests from outside -------------------------------------------------------------------

    def answer(self, request: Request, reply: Callable[[dict[str, Any]], None]) -> None:
        """Answer a request of any thread, in the loop's; silence when the loop does not run.

        The requests and their answers are those of bml.cluster.server.status.answer.
        """
        self._shell.request(partial(answer, self._shell, request, reply))
