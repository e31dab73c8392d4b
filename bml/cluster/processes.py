"""A job as plain processes on this machine: starts in a second, needs no Ray."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from bml.cluster.fleet import Answers, Changed, Died, FleetEvent, Reported, Request
from bml.cluster.job import Contact, JobSpec, Place, default_nics
from bml.cluster.nursery import Nursery
from bml.errors import StartError, UsageError
from bml.protocol.succession import GiveUp, Kill, Start, Succession
from faults import Fault

#: A process that has left so many questions unanswered is asked no more until it answers.
_MOST_UNANSWERED = 16

Placement = Callable[[int | None], Place]
"""Says where a server is to live; None stands for the coordinator."""

Strike = Callable[[Fault, Callable[[], None]], None]
"""Does a fault to real cables, and calls the function when it is done."""


@dataclass
class _Child:
    """A process and the launcher's end of its socket."""

    nursery: Nursery
    process: int
    connection: Connection[Any, Any]
    unanswered: int = 0
    gone: bool = False
    _returncode: int | None = None
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, *message: Any) -> None:
        """Send a message; any thread may."""
        with suppress(OSError), self._sending:  # it is dead: that shows when it is listened to
            self.connection.send_bytes(cloudpickle.dumps(message))

    def end(self) -> None:
        """Kill, frozen or not, and wait until it is gone."""
        self.nursery.kill(self.process)
        self.returncode()
        self.connection.close()

    def returncode(self) -> int | None:
        """Wait until it is gone; see Nursery."""
        if not self.gone:
            self.gone = True
            self._returncode = self.nursery.returncode(self.process)
        return self._returncode


class ProcessFleet:
    """See bml.cluster.fleet.Fleet. `strike` breaks real cables, when a server says that it is time to."""

    def __init__(
        self, spec: JobSpec, prints: bool, place: Placement | None = None, strike: Strike | None = None
    ):
        self.spec = self._spec = spec.settled(one_host=place is None)
        self._strike = strike
        self._answered = threading.Condition()
        self._questions: dict[int, dict[int, dict[str, Any]]] = {}
        self._number = 0
        self._place = place or self._on_loopback
        self._prints = prints
        self._nursery: Nursery | None = None
        self._servers: dict[int, _Child] = {}
        self._coordinator: _Child | None = None
        self._snapshot: dict[str, Any] = {}
        timeouts = spec.timeouts()
        self._succession = Succession(timeouts, timeouts.warm_up_s, time.monotonic())
        self._contacts: dict[int, Contact] = {}
        self._lives: dict[int, int] = {}
        self._train = b""

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._train = train
        self._nursery = Nursery(self._prints)
        for server in self._spec.servers:
            self._servers[server] = self._spawn()
        for server, child in self._servers.items():
            child.send("server", self._place(server), self._spec, server, None)
        deadline = time.monotonic() + self._spec.start_s
        for server, child in self._servers.items():
            self._contacts[server] = _receive(child, server, deadline)
        for child in self._servers.values():
            child.send(self._contacts, train)
        self._look_after_coordinator()

    def join(self, server: int) -> None:
        """See Fleet."""
        if server in self._servers:
            self._lost(server)
        spec = self._spec.for_joiner(again=server in self._lives)
        life = self._lives[server] = 1 + max(self._lives.values(), default=0)
        child = self._spawn()
        child.send("server", self._place(server), spec, server, life)
        try:
            contact = self._contacts[server] = _receive(child, server, time.monotonic() + self._spec.start_s)
        except StartError:
            child.end()
            raise
        child.send(dict(self._contacts), self._train)
        with self._answered:
            self._servers[server] = child
        if self._coordinator is not None:
            self._coordinator.send("join", server, life, contact)

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        children = {child.connection: server for server, child in self._servers.items()}
        watched = list(children)
        if self._coordinator is not None:
            watched.append(self._coordinator.connection)
        events: list[FleetEvent] = []
        now = time.monotonic()
        for connection in wait(watched, min(timeout_s, self._succession.next_deadline(now) - now)):
            assert isinstance(connection, Connection)
            event = (
                self._from_server(children[connection])
                if connection in children
                else self._from_coordinator(connection)
            )
            events += [event] if event else []
        self._look_after_coordinator()
        return events

    def ask(self, request: Request, timeout_s: float) -> Answers:
        """See Fleet."""
        deadline = time.monotonic() + timeout_s
        asked = [each for each in list(self._servers.items()) if each[1].unanswered < _MOST_UNANSWERED]
        with self._answered:
            self._number += 1
            number = self._number
            answers = self._questions[number] = {}
        for _, child in asked:
            child.unanswered += 1
            child.send("ask", number, request)
        with self._answered:
            while {server for server, _ in asked} & self._servers.keys() - answers.keys():
                if not self._answered.wait(max(0.0, deadline - time.monotonic())):
                    break
            return self._questions.pop(number)

    def close(self) -> None:
        """See Fleet."""
        for child in [*self._servers.values(), *([self._coordinator] if self._coordinator else [])]:
            child.end()
        self._servers.clear()
        self._coordinator = None
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _from_server(self, server: int) -> FleetEvent | None:
        child = self._servers[server]
        try:
            what, *rest = cloudpickle.loads(child.connection.recv_bytes())
        except (EOFError, OSError):
            return Died(server, self._lost(server))
        match what:
            case "answer":
                self._take_answer(server, child, *rest)
            case "strike":
                assert self._strike is not None
                self._strike(Fault.parse(rest[0], at_once=True), lambda: child.send("struck"))
            case "report":
                child.returncode()
                child.connection.close()
                self._forget(server)
                return Reported(rest[0])
        return None

    def _lost(self, server: int) -> str:
        """End what is left of a process, and tell the coordinator; returns how it ended."""
        child = self._servers[server]
        child.end()
        self._forget(server)
        why = _cause(child.returncode())
        if self._coordinator is not None:
            self._coordinator.send("gone", server, why)
        return why

    def _take_answer(self, server: int, child: _Child, number: int, answer: dict[str, Any]) -> None:
        child.unanswered = 0
        with self._answered:
            if number in self._questions:
                self._questions[number][server] = answer
                self._answered.notify_all()

    def _forget(self, server: int) -> None:
        with self._answered:
            del self._servers[server]
            self._answered.notify_all()  # nobody need wait for it any more

    # --- the coordinator -------------------------------------------------------------------------

    def _from_coordinator(self, connection: Connection[Any, Any]) -> FleetEvent | None:
        succession, now = self._succession, time.monotonic()
        try:
            what, *rest = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            assert self._coordinator is not None
            code, state = self._coordinator.returncode(), self._snapshot.get("state", "starting")
            why = f"was {state}, and {_cause(code)}"
            succession.ended(succession.term, why, now, done=code == 0 and state == "stopped")
            self._end_coordinator()
            return None
        succession.beat(succession.term, now)
        if what == "beat":
            return None
        snapshot = self._snapshot = rest[0]
        succession.said(snapshot["term"], snapshot["state"], snapshot["highest"])
        return Changed(snapshot)

    def _look_after_coordinator(self) -> None:
        """Do what the succession asks for. Raises StartError if the job cannot get a coordinator."""
        if not self._servers:
            return
        while (order := self._succession.look(time.monotonic())) is not None:
            match order:
                case Kill():
                    self._end_coordinator()
                case Start(term):
                    self._snapshot = {}
                    self._coordinator = self._spawn()
                    place = self._place(None)
                    self._coordinator.send(
                        "coordinator", place, self._spec, self._contacts, self._lives, term
                    )
                case GiveUp(why):
                    raise StartError(why)

    def _end_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.end()
            self._coordinator = None

    def _on_loopback(self, server: int | None) -> Place:
        levels = self._spec.parsed_fabric().levels
        if server is None:
            return Place()
        # On a machine with a NIC for each server: "10.7.0.{n},10.7.1.{n}", where n counts servers from 1.
        setting = os.environ.get("BML_NICS", "").replace("{n}", str(server + 1))
        nics = tuple(address.strip() for address in setting.split(",")) if setting else ()
        if nics and len(nics) != levels:
            raise UsageError(f"BML_NICS is {setting!r}: give an address for each of {levels} levels")
        return Place(nics or default_nics(server, levels))

    def _spawn(self) -> _Child:
        assert self._nursery is not None
        ours, theirs = socket.socketpair()
        with ours:
            process = self._nursery.fork(theirs, self._spec.start_s)
            return _Child(self._nursery, process, Connection(ours.detach()))


def _receive(child: _Child, server: int, deadline: float) -> Contact:
    try:
        if child.connection.poll(max(0.0, deadline - time.monotonic())):
            contact = cloudpickle.loads(child.connection.recv_bytes())
            assert isinstance(contact, Contact)
            return contact
    except (EOFError, OSError):
        raise StartError(f"server {server} died at start-up: {_cause(child.returncode())}") from None
    raise StartError(f"server {server} did not start in time")


def _cause(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"its process was killed by signal {-returncode}"
    return f"its process exited with status {returncode}"
