"""The fleet of plain processes on this machine: it starts in a second, and needs no Ray."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from bml.cluster.fleets.fleet import (
    Answers,
    ApplyFault,
    Changed,
    Died,
    FleetEvent,
    Known,
    Patience,
    Reported,
    look_after,
    reachable,
)
from bml.cluster.fleets.fork_server import ENDING_S, ForkServer
from bml.cluster.fleets.preloading import referenced, worth_preloading
from bml.cluster.fleets.process_spares import ProcessSpares
from bml.cluster.fleets.start_quorum import StartQuorum
from bml.cluster.process.mail import Inbox, Outbox
from bml.cluster.spec.ending import WRITING_S
from bml.cluster.spec.job import Contact, JobSpec, Place, Request, default_nics
from bml.cluster.spec.nics import nics_of
from bml.errors import StartError
from bml.faults import Fault
from bml.io.forks import close_on_fork
from bml.io.interruptible import Condition, Event
from bml.io.limits import check_loopback
from bml.protocol.coordinator.succession import Succession

#: A process with this many unanswered requests gets no more until it answers.
_MOST_UNANSWERED = 16
#: How many messages wait at most for a frozen process; in practice there are fewer.
_MOST_UNSENT = 1000
#: How long servers that have reported may take to end, in seconds; their last prints may wait for a reader.
_LAST_PRINTS_S = 5.0
_LOOK_S = 0.2  # how often a joiner's start looks whether the job has ended

Placement = Callable[[int | None], Place]
"""Returns the place of a server; None stands for the coordinator."""


class _Child:
    """A process, and the launcher's end of its socket, which never waits for the process."""

    def __init__(self, fork_server: ForkServer, process: int, sock: socket.socket):
        self.sock = sock
        self.inbox = Inbox(sock)
        self.unanswered = 0
        self._fork_server = fork_server
        self._process = process
        self._outbox = Outbox(sock, _MOST_UNSENT)

    def send(self, *message: Any) -> None:
        """Send a message; any thread may. If the process is dead, the next read shows it."""
        self._outbox.put(*message)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; processes that it forked may still hold the other end."""
        return self._fork_server.has_ended(self._process)

    def hang_up(self) -> None:
        """Hang up, so that it ends by itself, its daemonic children first."""
        self._outbox.close()

    def kill(self) -> int | None:
        """Kill it, frozen or not, and wait for its end; returns its return code, see ForkServer."""
        self._fork_server.kill(self._process)
        return self._fork_server.returncode(self._process)

    def end(self) -> int | None:
        """Kill it and release it; only the thread that waits for its socket may do this."""
        self.kill()
        return self.release()

    def release(self, within_s: float = ENDING_S) -> int | None:
        """Wait until it has ended by itself, `within_s` seconds at most, and release it."""
        returncode = self._fork_server.returncode(self._process, within_s)
        self._outbox.close()
        self.sock.close()
        return returncode


class ProcessFleet:
    """See bml.cluster.fleets.fleet.Fleet. `apply_fault` breaks real cables when a server asks for it."""

    def __init__(
        self,
        spec: JobSpec,
        prints: bool,
        place: Placement | None = None,
        apply_fault: ApplyFault | None = None,
    ):
        if place is None:
            check_loopback()
        settled = spec.settled(one_host=place is None)
        self.spec = self._spec = settled.sharing_cores() if place is None else settled
        self._apply_fault = apply_fault
        self._place = place or self._on_loopback
        self._prints = prints
        self._fork_server: ForkServer | None = None
        self._train = b""
        # Guards the attributes below: while one thread is in `wait`, others are in `join` and `ask`.
        self._changed = Condition()
        self._questions: dict[int, dict[int, dict[str, Any]]] = {}
        self._number = 0
        self._servers: dict[int, _Child] = {}
        self._coordinator: _Child | None = None
        self._snapshot: dict[str, Any] = {}
        timeouts = spec.timeouts()
        self._succession = Succession(timeouts, timeouts.warm_up_s, time.monotonic())
        self._known = Known()
        self._leaving: list[_Child] = []
        self.spares: ProcessSpares[_Child] = ProcessSpares(spec.spares, self._spawn_spare)

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._train = train
        loaded = dict(sys.modules)
        modules = worth_preloading(loaded, referenced(train, loaded))
        ending_s = WRITING_S if self._spec.keeping.folder else ENDING_S
        self._fork_server = ForkServer(self._prints, modules, len(self._spec.servers), ending_s)
        for server in self._spec.servers:
            self._servers[server] = self._spawn()
        for server, child in self._servers.items():
            child.send("server", self._place(server), self._spec, server, None)
        self._gather()
        for child in self._servers.values():
            child.send(self._known.contacts, train)
        self._look_after_coordinator()

    def _gather(self) -> None:
        """Wait until the job can begin; servers that have not come by then are absent, and ended."""
        spec = self._spec
        fabric, now = spec.parsed_fabric(), time.monotonic()
        quorum = StartQuorum(fabric, spec.servers, spec.min_start, spec.start_s, now)
        coming = dict(self._servers)
        while not quorum.begins(now := time.monotonic()):
            wait([child.sock for child in coming.values()], quorum.patience_s(now))
            for server, child in list(coming.items()):
                try:
                    contact = _first_word(child, server)
                except StartError as error:
                    del coming[server]
                    quorum.failed(server, error)
                    continue
                if contact is not None:
                    del coming[server]
                    self._known.contacts[server] = contact
                    quorum.came(server, time.monotonic())
        if late := self._servers.keys() - quorum.here:
            for server in late:
                self._servers.pop(server).end()
            self.spec = self._spec = spec.beginning_with(quorum.here)

    def join(self, server: int, incarnation: int, give_up: Event) -> None:
        """See Fleet."""
        before = self._remove(server)
        if before is not None:
            self._lost(server, before)
        spec = self._spec.for_joiner(again=server in self._known.incarnations)
        deadline = time.monotonic() + self._spec.start_s
        child = self.spares.take(server) or self._spawn()
        child.send("server", self._place(server), spec, server, incarnation)
        try:
            contact = _contact(child, server, deadline, give_up)
        except StartError:
            child.end()
            raise
        with self._changed:  # a coordinator that is started meanwhile knows it already, or is told
            self._known.came(server, incarnation, contact)
            self._servers[server] = child
            child.send(dict(self._known.contacts), self._train)
            self._tell_coordinator("join", server, incarnation, contact)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        fork_server = self._fork_server
        assert fork_server is not None
        self._release_ended()
        with self._changed:
            children, coordinator = dict(self._servers), self._coordinator
        watched = [child.sock for child in children.values()] + ([coordinator.sock] if coordinator else [])
        now = time.monotonic()
        due_s = self._succession.next_deadline(now) - now
        ready = wait([*watched, fork_server.ends], min(timeout_s, due_s))
        fork_server.heard()
        events: list[FleetEvent] = []
        for server, child in children.items():
            if child.sock in ready or child.has_ended:
                events += self._from_server(server, child)
        if coordinator and (coordinator.sock in ready or coordinator.has_ended):
            events += self._from_coordinator(coordinator)
        self._look_after_coordinator()
        return events

    def ask(self, request: Request, patience: Patience) -> Answers:
        """See Fleet."""
        begun_s = time.monotonic()
        with self._changed:
            asked = {s: child for s, child in self._servers.items() if child.unanswered < _MOST_UNANSWERED}
            self._number += 1
            number = self._number
            answers = self._questions[number] = {}
        for child in asked.values():
            child.unanswered += 1
            child.send("ask", number, request)
        with self._changed:
            while asked.keys() & self._servers.keys() - answers.keys():
                if not self._changed.wait(patience.left_s(answers, time.monotonic() - begun_s)):
                    break
            return self._questions.pop(number)

    def close(self) -> None:
        """See Fleet. Servers that have reported may still show their last prints."""
        deadline = time.monotonic() + _LAST_PRINTS_S
        for child in self._leaving:
            child.release(max(0.0, deadline - time.monotonic()))
        self._leaving.clear()
        self._end_coordinator()
        ending = [*self._servers.values(), *self.spares.close()]
        for child in self._servers.values():
            child.send("end")  # so that none takes the launcher for dead
        for child in ending:
            child.hang_up()
        deadline = time.monotonic() + ENDING_S
        for child in ending:
            child.release(max(0.0, deadline - time.monotonic()))
        self._servers.clear()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    # --- messages of servers ---------------------------------------------------------------------

    def _from_server(self, server: int, child: _Child) -> list[FleetEvent]:
        has_ended = child.has_ended  # looked at first: all messages from before its end are here then
        events: list[FleetEvent] = []
        for what, *rest in child.inbox.take():
            match what:
                case "answer":
                    self._take_answer(server, child, *rest)
                case "apply":
                    assert self._apply_fault is not None
                    self._apply_fault(Fault.parse(rest[0], at_once=True), lambda: child.send("applied"))
                case "report" if self._remove(server, child) is not None:
                    with self._changed:  # it may wait for room for its last prints
                        self._leaving.append(child)
                    events.append(Reported(rest[0]))
        if (has_ended or child.inbox.over) and self._remove(server, child) is not None:
            events.append(Died(server, self._lost(server, child)))
        return events

    def _lost(self, server: int, child: _Child) -> str:
        """Kill a process if it still runs, and tell the coordinator; returns how it ended."""
        why = _cause(child.kill())
        with self._changed:
            self._leaving.append(child)
            self._known.gone[server] = why
            self._tell_coordinator("gone", server, why)
        return why

    def _release_ended(self) -> None:
        """Release processes that have ended; only the thread that waits for sockets closes them."""
        with self._changed:
            dead = [each for each in self._leaving if each.has_ended]
            self._leaving = [each for each in self._leaving if each not in dead]
        for child in dead:
            child.release()

    def _take_answer(self, server: int, child: _Child, number: int, answer: dict[str, Any]) -> None:
        child.unanswered = 0
        with self._changed:
            if number in self._questions:
                self._questions[number][server] = answer
                self._changed.notify_all()

    def _remove(self, server: int, child: _Child | None = None) -> _Child | None:
        """Remove a server's process, or this one of its, from the running ones; None if it is not there."""
        with self._changed:
            if child is not None and self._servers.get(server) is not child:
                return None
            self._changed.notify_all()  # no thread need wait for it any more
            return self._servers.pop(server, None)

    # --- the coordinator -------------------------------------------------------------------------

    def _from_coordinator(self, coordinator: _Child) -> list[FleetEvent]:
        has_ended = coordinator.has_ended
        succession, now = self._succession, time.monotonic()
        events: list[FleetEvent] = []
        ends = has_ended
        for what, *rest in coordinator.inbox.take():
            match what:
                case "alive":
                    succession.heartbeat(succession.term, now)
                case "changed":
                    snapshot = self._snapshot = rest[-1]
                    succession.reported(snapshot["term"], snapshot["state"], snapshot["highest"])
                    events.append(Changed(snapshot))
                case "ended":
                    ends = True
        if ends or coordinator.inbox.over:
            by_itself = ends and not has_ended
            code, state = self._end_coordinator(), self._snapshot.get("state", "starting")
            why = f"was {state}, and {'ended' if by_itself else _cause(code)}"
            # Without a code the fork server is stopped too: it could not make a successor.
            succession.ended(succession.term, why, now, (by_itself or code is None) and state == "stopped")
        return events

    def _look_after_coordinator(self) -> None:
        """Raises StartError if the job cannot get a coordinator."""
        if self._servers:
            look_after(self._succession, time.monotonic(), self._end_coordinator, self._start_coordinator)

    def _start_coordinator(self, term: int) -> None:
        self._snapshot = {}
        coordinator = self._spawn()
        with self._changed:
            self._coordinator = coordinator
            known, spec = self._known, self._spec
            coordinator.send("coordinator", self._place(None))
            coordinator.send("start", spec.job, spec, known.contacts, known.incarnations, term)
            for server, why in known.gone.items():
                coordinator.send("gone", spec.job, server, why)

    def _end_coordinator(self) -> int | None:
        with self._changed:
            coordinator, self._coordinator = self._coordinator, None
        return coordinator.end() if coordinator is not None else None

    def _tell_coordinator(self, what: str, *rest: Any) -> None:
        """Tell the current coordinator, under the lock."""
        if self._coordinator is not None:
            self._coordinator.send(what, self._spec.job, *rest)

    def _on_loopback(self, server: int | None) -> Place:
        levels = self._spec.parsed_fabric().levels
        if server is None:
            return Place()
        # On a machine with a NIC for each server: "10.7.0.{n},10.7.1.{n}", where n counts servers from 1.
        return Place(nics_of(os.environ, levels, server) or default_nics(server, levels))

    def _spawn(self) -> _Child:
        assert self._fork_server is not None
        ours, theirs = socket.socketpair()
        close_on_fork(ours)
        try:
            return _Child(self._fork_server, self._fork_server.fork(theirs, self._spec.start_s), ours)
        except StartError:
            ours.close()
            raise

    def _spawn_spare(self) -> _Child:
        child = self._spawn()
        child.send("spare", Place(), self._train)
        return child


def _contact(child: _Child, server: int, deadline: float, give_up: Event) -> Contact:
    """Wait for the addresses of a server that was just started. Raises StartError, see `_first_word`."""
    while (contact := _first_word(child, server)) is None:
        if give_up.is_set():
            raise StartError(f"server {server} was still being started when the job ended")
        if time.monotonic() > deadline:
            raise StartError(f"server {server} did not start in time")
        wait([child.sock], _LOOK_S)
    return contact


def _first_word(child: _Child, server: int) -> Contact | None:
    """Return the first message of a server: its addresses (see `reachable`); None if it is not here yet."""
    said = child.inbox.take()
    if not said:
        if child.inbox.over:
            raise StartError(f"server {server} died at start-up: {_cause(child.kill())}")
        return None
    ((contact,),) = said
    return reachable(server, contact)


def _cause(returncode: int | None) -> str:
    if returncode is None:
        return "its process is gone"
    if returncode < 0:
        return f"its process was killed by signal {-returncode}"
    return f"its process exited with status {returncode}"
