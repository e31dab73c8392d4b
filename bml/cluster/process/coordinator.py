"""The shell of the coordinator: it connects to every server, and runs the pure coordinator.

It needs only the addresses of the servers. A successor on any machine connects to them, asks for their state,
and goes on.

Coordinators run in a process of their own, for a rank, or for the launcher of a job of processes. It ends
when this parent hangs up or is gone. Messages of the parent are pickled; nothing else is ever unpickled.

    parent to process   ("start", group, specification, contacts, incarnations, term)
                        ("join", group, server, incarnation, contact); ("gone", group, server, why)
    process to parent   ("ready",); ("alive",), a sign of life; ("changed", group, term, snapshot)
                        ("ended", group, term, which one deposed it)
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from bml.cluster.injection.acts import COORDINATOR_ACTS
from bml.cluster.process.logs import LogsAside
from bml.cluster.process.mail import Outbox, receive
from bml.cluster.spec import news
from bml.cluster.spec.job import Contact, Contacts, JobSpec, check_contacts
from bml.errors import UsageError
from bml.faults import Fault, FaultPlan
from bml.io.poller import Poller
from bml.protocol.coordinator import core as core
from bml.protocol.wire import messages as msg
from bml.protocol.wire.validate import check_from_server
from bml.transport.handshake import control
from bml.transport.handshake.auth import Identity

_LOG = logging.getLogger(__name__)

#: How long the coordinator still answers latecomers after the job's end, in seconds.
_LINGER_S = 1.0
_REDIAL_S = 0.05  # short beside `detect_s`; a server that is away costs 20 dials a second
ALIVE_EVERY_S = 0.25
"""How often a coordinator gives a sign of life at least, in seconds."""
_HANGS_S = 1.0  # one that gives none for so long silences the others of its process
_LAST_LOGS_S = 1.0  # its last logs may take so long to be written
#: How many of the newest requests to join are in a snapshot, for a launcher that reads late.
_ASKED_KEPT = 64


class CoordinatorLoop:
    """One coordinator of a job, with a term of its own; `run` returns when the job is over.

    `on_change` gets snapshots. The loop calls `on_heartbeat` every `Timeouts.heartbeat_s`, and at least
    every ALIVE_EVERY_S: a loop that hangs gives no sign of life.
    """

    def __init__(
        self,
        spec: JobSpec,
        contacts: Contacts,
        incarnations: Mapping[int, int],
        term: int,
        on_change: Callable[[dict[str, Any]], None],
        on_heartbeat: Callable[[], None],
    ):
        self._spec = spec
        self._contacts = dict(contacts)
        self._incarnations = dict(incarnations)
        self._asked: deque[tuple[int, str]] = deque(maxlen=_ASKED_KEPT)
        self._n_asked = 0
        self._on_change, self._on_heartbeat = on_change, on_heartbeat
        self._timeouts = spec.timeouts()
        self._poller = Poller(on_wake=self._take_events)
        self._events: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._channels: dict[int, control.Channel] = {}
        self._failing_since: dict[int, float] = {}
        self._dialling: set[int] = set()
        self._finished: core.Finished | None = None
        self._over_at = float("inf")
        self._last: dict[str, Any] = {}
        now = time.monotonic()
        self._fabric = spec.parsed_fabric()
        adapts = spec.algorithm in ("auto", "packed")
        self._core = core.Coordinator(
            self._fabric, term, self._timeouts, spec.min_servers, now, spec.absent, adapts
        )
        self._heartbeat_at = now
        self._logged = ""

    def say(self, event: core.Event) -> None:
        """Give the loop an event (a death that a launcher noticed, an interrupt); any thread may call it."""
        self._soon(lambda: self._handle(event))

    def join(self, server: int, incarnation: int, contact: Contact) -> None:
        """Note where a server that was started to join is reached; any thread may call it."""
        self._soon(lambda: self._meet(server, incarnation, contact))

    def _soon(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._events.append(action)
        self._poller.wake()

    def run(self) -> None:
        """Connect to every server and serve until the job is over."""
        for server in self._contacts:
            self._dial(server)
        while not self._over():
            now = time.monotonic()
            due = min(self._core.next_deadline(now), self._over_at, self._heartbeat_at)
            self._poller.poll(max(0.0, due - now))
            self._handle(core.Tick())
            self._report()
            self._heartbeat()
        for channel in list(self._channels.values()):
            channel.close()
        self._poller.close()

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + min(self._timeouts.heartbeat_s, ALIVE_EVERY_S)
            self._on_heartbeat()

    def _over(self) -> bool:
        """Whether the job is over, and every server that can be reached has been told."""
        told = self._finished is not None and not self._channels and not self._dialling
        return told or time.monotonic() >= self._over_at

    @property
    def deposed_by(self) -> int:
        """The term of the coordinator that has deposed this one; 0: none has."""
        return self._finished.deposed_by if self._finished else 0

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the job, ready for JSON.

        `state` is that of the core, or "deposed" if there is a coordinator with a higher term; `highest` is
        the highest known term. `abort` is None or, if the job was aborted, the arguments of
        bml.errors.job_error: {"kind", "text", "server"}.
        """
        view = self._core.view
        abort = self._finished.abort if self._finished else None
        return {
            "state": "deposed" if self.deposed_by else self._core.state,
            "epoch": view.epoch if view else 0,
            "members": list(self._core.members),
            "failures": list(view.failures) if view else [],
            "slow": msg.slow_nics(view) if view else {},
            "reason": view.reason if view else "",
            "commit": view.commit if view else 0,
            "noticed_s": view.noticed_s if view else 0.0,
            "step": self._core.step,
            "suspicions": self._core.suspicions,
            "learners": list(view.learners) if view else [],
            "waiting": list(self._core.waiting),
            "incarnations": dict(self._incarnations),
            "joined": {incarnation.server: incarnation.number for incarnation in view.joined} if view else {},
            "term": self._core.term,
            "highest": max(self._core.term, self.deposed_by),
            "asked": list(self._asked),
            "abort": abort and {"kind": abort.kind, "text": abort.text, "server": abort.server},
        }

    def _report(self) -> None:
        now = self.snapshot()
        if now != self._last:
            self._last = now
            self._on_change(now)

    def _take_events(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event()

    def _handle(self, event: core.Event) -> None:
        self._execute(self._core.handle(event, time.monotonic()))
        for incarnation in self._core.view.joined if self._core.view else ():
            self._meet(incarnation.server, incarnation.number, Contact.decode(incarnation.contact))

    def _meet(self, server: int, incarnation: int, contact: Contact) -> None:
        """Connect to the newest incarnation of a server, and to no older one."""
        if incarnation <= self._incarnations.get(server, 0) or self._finished is not None:
            return
        self._incarnations[server], self._contacts[server] = incarnation, contact
        _LOG.info("%s", news.line("join", term=self._core.term, server=server, incarnation=incarnation))
        self._failing_since.pop(server, None)
        channel = self._channels.pop(server, None)
        if channel is not None:
            channel.close()
        if channel is not None or server not in self._dialling:
            self._dial(server)

    def _execute(self, instructions: Iterable[core.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, core.Finished):
                self._finished = instruction
                self._over_at = time.monotonic() + self._linger_s(instruction)
                continue
            self._log(instruction.server, instruction.message)
            if instruction.server in self._channels:
                self._channels[instruction.server].send(msg.encode(instruction.message))

    def _log(self, server: int, message: msg.ToServer) -> None:
        """Log what is asked of servers, the same of all of them once."""
        if not _LOG.isEnabledFor(logging.INFO):
            return
        text = news.of_coordinator(self._core.term, server, message)
        if text and text != self._logged:
            self._logged = text
            _LOG.info("%s", text)

    def _linger_s(self, end: core.Finished) -> float:
        """Return how long it tries to reach servers that have not been told of the end, in seconds."""
        if end.deposed_by:
            return 0.0  # its successor tells the servers
        # If the job never began, missing servers may still be importing.
        return _LINGER_S if self._core.view is not None else self._timeouts.orphan_s

    # --- connections -----------------------------------------------------------------------------

    def _dial(self, server: int) -> None:
        self._dialling.add(server)
        self._failing_since.setdefault(server, time.monotonic())
        contact = self._contacts[server]
        host, port = contact.control
        control.dial(
            host,
            port,
            identity=Identity.of(self._spec.token, self._spec.job, control.COORDINATOR),
            expect_server=server,
            expect_incarnation=self._incarnations.get(server, 0),
            poller=self._poller,
            on_open=lambda channel: self._opened(server, contact, channel),
            on_fail=lambda end: self._failed(server, contact, end),
            timeout_s=self._timeouts.longest_answer_s,
        )

    def _opened(self, server: int, contact: Contact, channel: control.Channel) -> None:
        if contact != self._contacts[server]:
            channel.close()
            self._dial(server)  # that was an earlier incarnation
            return
        self._failing_since.pop(server, None)
        self._dialling.discard(server)
        self._channels[server] = channel
        channel.listen(
            lambda data: self._received(server, channel, data), lambda end: self._closed(server, channel)
        )
        self._handle(core.Connected(server))

    def _closed(self, server: int, channel: control.Channel) -> None:
        """Dial again after a connection broke: that shows whether the server is dead."""
        if self._channels.get(server) is channel:
            del self._channels[server]
            self._dial(server)

    def _failed(self, server: int, contact: Contact, end: control.End) -> None:
        """Take a refused dial as proof of death; dial on if the server cannot be reached."""
        if contact != self._contacts[server]:
            self._dial(server)  # that was an earlier incarnation
            return
        if end.kind == "refused":
            self._dialling.discard(server)
            self._handle(core.Gone(server, "its process is gone: it refuses connections"))
            return
        now = time.monotonic()
        for_s = now - self._failing_since.setdefault(server, now)
        self._handle(core.Unreached(server, f"cannot be reached ({end.kind})", for_s))
        self._poller.after(_REDIAL_S, lambda: self._dial(server))

    def _received(self, server: int, channel: control.Channel, data: bytes) -> None:
        try:
            message = check_from_server(msg.decode(data), server, self._fabric)
            fault = self._asked_for(message) if isinstance(message, msg.Inject) else None
            if isinstance(message, msg.Status):
                self._check_incarnations(message)
        except (msg.MessageError, UsageError) as error:
            _LOG.warning("the coordinator closed its connection to server %d: %s", server, error)
            channel.close()
            self._closed(server, channel)
            return
        if fault is not None:
            COORDINATOR_ACTS[fault.kind].apply(fault, self._ask_launcher)
        else:
            self._handle(core.From(server, message))

    def _asked_for(self, message: msg.Inject) -> Fault:
        """Apply a fault that servers cannot apply themselves. Raises UsageError for other faults."""
        fault = Fault.parse(message.fault, at_once=True)
        FaultPlan((fault,)).validate(self._fabric)
        if not fault.by_anybody:
            raise UsageError(f"{fault} is not a fault that the coordinator applies")
        return fault

    def _check_incarnations(self, status: msg.Status) -> None:
        """Raise MessageError if an incarnation has no usable address."""
        known = [view for view in (status.installed, status.accepted) if view is not None]
        incarnations = [incarnation for view in known for incarnation in view.joined]
        check_contacts(
            incarnations if status.incarnation is None else [*incarnations, status.incarnation],
            self._fabric.levels,
        )

    def _ask_launcher(self, fault: Fault) -> None:
        self._n_asked += 1
        self._asked.append((self._n_asked, str(fault)))  # the launcher reads it, and starts the server


class CoordinatorHost:
    """The coordinators of one parent, a thread for each; `say` takes what it is told, snapshots if asked."""

    def __init__(self, say: Callable[..., None], drain_logs: Callable[[], None], asked_for_snapshots: bool):
        self._say = say
        self._drain_logs = drain_logs
        self._asked_for_snapshots = asked_for_snapshots
        self._loops: dict[str, CoordinatorLoop] = {}
        self._changed = threading.Lock()
        self._turned_at: dict[CoordinatorLoop, float] = {}  # its last sign of life, of each that runs

    def turned(self, loop: CoordinatorLoop | None = None) -> None:
        """A loop turns, or none runs: give a sign of life, unless some loop hangs."""
        with self._changed:
            now = time.monotonic()
            if loop is not None:
                self._turned_at[loop] = now
            hangs = any(now - at > _HANGS_S for at in self._turned_at.values())
            if not hangs and (loop is not None or not self._turned_at):
                self._say("alive")

    def take(self, what: str, group: str, *rest: Any) -> None:
        """A message of the parent."""
        loop = self._loops.get(group)
        match what:
            case "start":
                self._start(group, *rest)
            case "join" if loop is not None:
                loop.join(*rest)
            case "gone" if loop is not None:
                loop.say(core.Gone(*rest))

    def _start(
        self, group: str, spec: JobSpec, contacts: Contacts, incarnations: Mapping[int, int], term: int
    ) -> None:
        """Start a coordinator; an older one of this group ends by itself, as the servers depose it."""
        changed = partial(self._say, "changed", group, term)
        told = changed if self._asked_for_snapshots else lambda snapshot: None
        loop = CoordinatorLoop(spec, contacts, incarnations, term, told, lambda: self.turned(loop))
        self._loops[group] = loop
        self.turned(loop)
        name = f"bml-coordinator-{group}"
        threading.Thread(target=self._run, args=(group, loop, term), name=name, daemon=True).start()

    def _run(self, group: str, loop: CoordinatorLoop, term: int) -> None:
        try:
            loop.run()
        except BaseException:  # its lines must not stay open: the servers would wait for it
            traceback.print_exc()
            os._exit(1)
        with self._changed:
            del self._turned_at[loop]
            if self._loops.get(group) is loop:
                del self._loops[group]
        self._drain_logs()  # the parent may kill this process when it hears of the end
        self._say("ended", group, term, loop.deposed_by)


def main() -> None:
    """Run coordinators for the rank at the other end of the socket given as the first argument."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the rank
    serve(socket.socket(fileno=int(sys.argv[1])), asked_for_snapshots=False)


def serve(sock: socket.socket, asked_for_snapshots: bool) -> None:
    """Run coordinators for the parent at the other end of `sock`; ends this process when that is gone."""
    logs = LogsAside()
    logs.start()
    outbox = Outbox(sock, most=1)  # each snapshot of a group replaces older ones, as signs of life do
    host = CoordinatorHost(outbox.put, partial(logs.drain, _LAST_LOGS_S), asked_for_snapshots)
    outbox.put("ready")
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        host.turned()
        if poll.poll(ALIVE_EVERY_S * 1000):
            try:
                message = receive(sock)
            except (EOFError, OSError):
                os._exit(0)
            host.take(*message)
