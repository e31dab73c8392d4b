"""Carries out on sockets and memory what the server's core says, in order, and decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from bml.cluster.server.direct import DirectSync
from bml.cluster.server.following import Follower
from bml.cluster.server.handover import Handover
from bml.cluster.server.injection import Injection
from bml.cluster.server.meeting import Meeting
from bml.cluster.spec.job import Contact
from bml.cluster.spec.trace import Trace, TracedWorkspace
from bml.io.memory import Memory
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.step.dataflow import Buffer, Reduce, Send
from bml.protocol.step.direct import Post, Quit, Stage, Sum
from bml.protocol.step.spans import Spans
from bml.protocol.step.workspace import Array, Workspace
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import Call, neutral
from bml.protocol.wire.frame import Kind
from bml.sharedmem.zero_copy import ZeroCopy
from bml.topology.errors import BmlError, InvariantError
from bml.train.communicator import Committed, Retried
from bml.transport.interface import Transport

_TEXT_PRIORITY = -2
_NO_RESULT: Array = np.empty(0, np.uint8)
#: How long the loop of a job that failed still delivers what it has said, in seconds.
_LINGER_S = 0.2


class Execution:
    """What one server does in the loop's thread, and in the training thread where servers share memory.

    `workspace` is the memory of the step that is under way. `contacts` says where the others are, and
    `incarnations` which run of each is meant.
    `leave_at`: when the loop is to end, on the clock of time.monotonic; None: not yet.
    """

    def __init__(
        self,
        core: ServerCore,
        transport: Transport,
        memory: Memory,
        injection: Injection,
        handover: Handover,
        meeting: Meeting,
        tell: Callable[[msg.ToCoordinator], None],
        trace: Trace | None,
    ):
        self.workspace: Workspace | None = None
        self.direct: DirectSync | None = None
        self.follower: Follower | None = None
        self.zero_copy: ZeroCopy | None = None
        self.contacts: dict[int, Contact] = {}
        self.incarnations: dict[int, int] = {}
        self.leave_at: float | None = None
        self._core = core
        self._transport = transport
        self._memory = memory
        self._injection = injection
        self._handover = handover
        self._meeting = meeting
        self._tell = tell
        self._trace = trace
        self._user_ended = False

    def execute(self, instructions: Iterable[ev.Instruction]) -> None:
        """Carry them out."""
        for instruction in instructions:
            kind = type(instruction)
            if kind is Send:
                self._send(instruction)  # type: ignore[arg-type]
            elif kind is Reduce:
                assert self.workspace is not None
                self.workspace.reduce(instruction)  # type: ignore[arg-type]
            elif kind is ev.Resume:
                self._transport.resume()
            elif kind is Post:
                self._post(instruction)  # type: ignore[arg-type]
            elif kind is Sum:
                assert self.direct is not None
                self.direct.add(instruction)  # type: ignore[arg-type]
            else:
                self._carry_out(instruction)

    def stop(self, error: BmlError) -> None:
        """The job is over here."""
        self._meeting.stop(error)
        self._handover.fail(error)
        self._leave_if_over()

    def user_ended(self) -> None:
        """The training function brings nothing any more."""
        self._user_ended = True
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        """Once the job has failed and the training function has ended, nothing is left to serve."""
        if self._user_ended and self._meeting.error is not None and self.leave_at is None:
            self.leave_at = time.monotonic() + _LINGER_S

    # --- data ------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        peer, level, header, place, priority = send
        if self._injection.pending:
            self._injection.saw(header)
            if header.kind == Kind.TOKEN:
                self._injection.before_token(header.step, self._core, time.monotonic())
        payload = None
        if place is not None and place.buffer == Buffer.STATE:
            payload = self._handover.outgoing(place, header.nbytes)
        elif place is not None:
            assert self.workspace is not None
            payload = self.workspace.view(place, header.stop - header.start)
        self._transport.send(peer, level, header, payload, priority)

    def _post(self, post: Post) -> None:
        assert self.direct is not None
        if post.stage is Stage.COMPLETE and self._injection.pending:
            self._injection.before_token(post.step, self._core, time.monotonic())
        self.direct.post(post)

    def _open(self, step: int, scratch_elements: int, follows: Call | None, left: Spans) -> None:
        if self._trace is not None:
            self._trace.opened(step)
        if left:
            assert self.workspace is not None
            self.workspace = self.workspace.resume(left, scratch_elements)
            return
        if follows is not None:
            vector, op = neutral(follows), follows.op
        else:
            assert self._meeting.contribution is not None
            vector, op = self._meeting.contribution
        self.workspace = None  # the memory of a try that failed serves the next
        if self._trace is None:
            self.workspace = Workspace(vector, scratch_elements, op, self._memory.empty)
            return
        self.workspace = traced = TracedWorkspace(vector, scratch_elements, op, self._memory.empty)
        traced.trace = self._trace

    def _committed(self, step: int, epoch: int, contributors: tuple[int, ...]) -> Committed:
        """The result of the step that has ended."""
        assert self.workspace is not None
        result, self.workspace = self.workspace.result, None
        if self._trace is not None:
            self._trace.ended("committed")
        return Committed(step, epoch, contributors, result)

    def _committed_for_nobody(self) -> None:
        """The result of the step that has ended is dropped."""
        self.workspace = None
        if self._trace is not None and self.direct is None:
            self._trace.ended("committed")

    # --- everything else -------------------------------------------------------------------------

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.SendText(peer, level, header, text):
                if header.kind == Kind.HEAD and self._injection.pending:
                    self._injection.before_state(self._core, time.monotonic())
                self._transport.send(peer, level, header, memoryview(text), _TEXT_PRIORITY)
            case ev.Open() if self.direct is not None:
                pass  # who said Submit, or Follow, has brought it to the others
            case ev.Called(submit):
                assert self.follower is not None
                self.follower.called(submit)
            case ev.Open(step, scratch_elements, follows, left):
                self._open(step, scratch_elements, follows, left)
            case ev.Commit(step, epoch, contributors) if self.direct is not None:
                self._meeting.give(Committed(step, epoch, contributors, _NO_RESULT))  # it knows where it lies
            case ev.Commit(step, epoch, contributors):
                self._meeting.commit(self._committed(step, epoch, contributors))
            case ev.FetchResult(follows=follows):
                assert self.direct is not None
                self.direct.keep(instruction) if follows else self._meeting.replies.put(instruction)
            case Quit():
                assert self.direct is not None
                self.direct.quit(instruction)
            case ev.Begin(replays):
                self._handover.begin(replays)
            case ev.Prepare():
                self._meeting.replies.put(instruction)
            case ev.Keep(step, epoch, contributors) if self.direct is not None:
                self.direct.keep(Committed(step, epoch, contributors, _NO_RESULT))
            case ev.Keep(step, epoch, contributors):
                self._handover.keep(self._committed(step, epoch, contributors))
            case ev.Skip():
                self._committed_for_nobody()
            case ev.Behind(step):
                self._handover.behind(step)
            case ev.Replay():
                self._meeting.give(instruction)
            case ev.Expect(nbytes):
                self._handover.expect(nbytes)
            case ev.StateHere(step, digests):
                self._handover.here(step, digests)
            case ev.Retry(step, epoch):
                self._meeting.replies.put(Retried(step, epoch))
            case ev.Stop(error):
                self.stop(error)
            case ev.Installed(view):
                self._installed(view)
            case ev.Links(wanted):
                self._transport.set_peers(
                    {(peer, level): self.contacts[peer].nics[level] for peer, level in wanted},
                    self.incarnations,
                )
            case ev.Fence():
                self._transport.fence()
            case ev.Heartbeat(peer, level):
                self._transport.heartbeat(
                    peer, level, self.contacts[peer].nics[level], self.incarnations.get(peer, 0)
                )
            case ev.Probe(peer, level):
                self._transport.probe(
                    peer, level, self.contacts[peer].nics[level], self.incarnations.get(peer, 0)
                )
            case ev.Tell(message):
                self._tell(message)
            case ev.Leave():  # all are done: nobody needs anything of it
                self.leave_at = time.monotonic()
            case _:
                raise InvariantError(
                    f"server {self._core.server} ({self._core.waits_for()}): unknown {instruction}"
                )

    def _installed(self, view: msg.View) -> None:
        for incarnation in view.joined:
            self.contacts[incarnation.server] = Contact.decode(incarnation.contact)
        self.incarnations = {incarnation.server: incarnation.number for incarnation in view.joined}
        if self.direct is not None:
            self.direct.admit({server: self.contacts[server].status_page for server in view.members})
        if self.zero_copy is not None:
            self.zero_copy.meet({server: self.contacts[server].registration_page for server in view.members})
        joins = view.incarnation(self._core.server) is not None
        self._injection.start(time.monotonic(), view.commit if joins else None)
        self._meeting.in_force.set()
