"""Carries out the instructions of a server's core on sockets and memory, in order, and decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from bml.cluster.injection.injection import Injection
from bml.cluster.server.peers import Peers
from bml.cluster.spec import news
from bml.cluster.steps.handover import Handover
from bml.cluster.steps.mailbox import Mailbox
from bml.cluster.steps.runner import StepRunner
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.step.dataflow import Buffer, Send
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Kind
from bml.topology.errors import BmlError, InvariantError
from bml.train.communicator import Retried
from bml.transport.interface import Transport

_LOG = logging.getLogger(__name__)

_TEXT_PRIORITY = -2
#: For so long the loop of a job that failed still delivers messages, in seconds.
_LINGER_S = 0.2


class Execution:
    """The function for each kind of instruction of a core; those for the memory of steps are the runner's.

    `leave_at`: when the loop is to end, on the clock of time.monotonic; None: not yet.
    """

    def __init__(
        self,
        core: ServerCore,
        transport: Transport,
        runner: StepRunner,
        peers: Peers,
        injection: Injection,
        handover: Handover,
        mailbox: Mailbox,
        tell: Callable[[msg.ToCoordinator], None],
    ):
        self.leave_at: float | None = None
        self._core = core
        self._transport = transport
        self._runner = runner
        self._peers = peers
        self._injection = injection
        self._handover = handover
        self._mailbox = mailbox
        self._say = tell
        self._user_ended = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            ev.SendText: self._send_text,
            ev.Begin: lambda said: handover.begin(said.replays),
            ev.Prepare: mailbox.replies.put,
            ev.ResultsDropped: lambda said: handover.behind(said.step),
            ev.Replay: mailbox.give,
            ev.AllocateState: lambda said: handover.expect(said.nbytes),
            ev.StateComplete: self._state_complete,
            ev.Retry: lambda said: mailbox.replies.put(Retried(said.step, said.epoch)),
            ev.Stop: self._stopped,
            ev.Installed: self._installed,
            ev.Resume: lambda said: transport.resume(),
            ev.Links: self._links,
            ev.Fence: lambda said: transport.fence(),
            ev.Heartbeat: self._heartbeat,
            ev.Probe: self._probe,
            ev.Tell: self._tell,
            ev.Exit: self._leave,
            **runner.handlers,
        }

    def execute(self, instructions: Iterable[ev.Instruction]) -> None:
        """Carry them out, in order."""
        handlers, unknown = self._handlers, self._unknown
        for instruction in instructions:
            handlers.get(type(instruction), unknown)(instruction)

    def stop(self, error: BmlError) -> None:
        """The job is over here."""
        self._mailbox.stop(error)
        self._handover.fail(error)
        self._leave_if_over()

    def user_ended(self) -> None:
        """The training function brings nothing any more."""
        self._user_ended = True
        self._leave_if_over()

    def coordinator_lost(self) -> None:
        """The coordinator has hung up: if this server is to leave, its last word was heard."""
        if self.leave_at is not None:
            self.leave_at = 0.0

    def _leave_if_over(self) -> None:
        """Once the job has failed and the training function has ended, nothing is left to serve."""
        if self._user_ended and self._mailbox.error is not None and self.leave_at is None:
            self.leave_at = time.monotonic() + _LINGER_S

    # --- instructions ----------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        peer, level, header, place, priority = send
        if self._injection.pending:
            self._injection.saw(header)
            if header.kind == Kind.TOKEN:
                self._injection.before_token(header.step, self._core, time.monotonic())
        payload = None
        if place is not None and place.buffer == Buffer.STATE:
            payload = self._handover.outgoing(place, header.nbytes)
            self._mailbox.counts.state_sent_nbytes += header.nbytes
        elif place is not None:
            workspace = self._runner.workspace
            assert workspace is not None
            payload = workspace.view(place, header.stop - header.start)
        self._transport.send(peer, level, header, payload, priority)

    def _send_text(self, send: ev.SendText) -> None:
        if send.header.kind == Kind.HEAD and self._injection.pending:
            self._injection.before_state(self._core, time.monotonic())
        self._transport.send(send.peer, send.level, send.header, memoryview(send.text), _TEXT_PRIORITY)

    def _links(self, links: ev.Links) -> None:
        contacts = self._peers.contacts
        wanted = {(peer, level): contacts[peer].nics[level] for peer, level in links.wanted}
        self._transport.set_peers(wanted, self._peers.incarnations)

    def _heartbeat(self, heartbeat: ev.Heartbeat) -> None:
        peer, level = heartbeat.peer, heartbeat.level
        self._transport.heartbeat(peer, level, *self._peers.at(peer, level))

    def _probe(self, probe: ev.Probe) -> None:
        peer, level = probe.peer, probe.level
        self._transport.probe(peer, level, *self._peers.at(peer, level))

    def _state_complete(self, said: ev.StateComplete) -> None:
        self._mailbox.counts.state_received_nbytes += self._handover.incoming_nbytes
        self._handover.here(said.step, said.digests)

    def _tell(self, told: ev.Tell) -> None:
        self._log(told)
        if isinstance(told.message, msg.Suspect):
            self._mailbox.counts.suspicions[told.message.kind] += 1
        self._say(told.message)

    def _stopped(self, stop: ev.Stop) -> None:
        self._log(stop)
        self.stop(stop.error)

    def _log(self, instruction: ev.Installed | ev.Stop | ev.Tell) -> None:
        if _LOG.isEnabledFor(logging.INFO) and (text := news.of_server(self._core.server, instruction)):
            _LOG.info("%s", text)

    def _installed(self, installed: ev.Installed) -> None:
        self._log(installed)
        view = installed.view
        self._mailbox.counts.installed(self._core.views)
        self._runner.admit(self._peers.installed(view))
        joins = view.incarnation(self._core.server) is not None
        self._injection.start(time.monotonic(), view.commit if joins else None)
        self._mailbox.in_force.set()

    def _leave(self, _: ev.Exit) -> None:
        """All servers are done: no server needs anything of this one."""
        self.leave_at = time.monotonic()

    def _unknown(self, instruction: ev.Instruction) -> None:
        core = self._core
        raise InvariantError(f"server {core.server} ({core.waits_for()}): unknown {instruction}")
