"""A job as plain processes on this machine: starts in a second, needs no Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from bml.cluster.fleet import Changed, Died, FleetEvent, Reported
from bml.cluster.job import Contact, JobSpec, Place, default_nics
from bml.errors import StartError

#: A coordinator that dies this often in one job is not started again.
_MOST_COORDINATORS = 100
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Placement = Callable[[int | None], Place]
"""Says where a server is to live; None stands for the coordinator."""


@dataclass
class _Child:
    """A process and the launcher's end of its socket."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]

    def send(self, *message: Any) -> None:
        with suppress(OSError):  # it is dead: that shows when it is listened to
            self.connection.send_bytes(cloudpickle.dumps(message))

    def end(self) -> None:
        """Kill, frozen or not, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class ProcessFleet:
    """See bml.cluster.fleet.Fleet."""

    def __init__(self, spec: JobSpec, prints: bool, place: Placement | None = None):
        self._spec = spec
        self._place = place or self._on_loopback
        self._stdout = None if prints else subprocess.DEVNULL
        self._servers: dict[int, _Child] = {}
        self._coordinator: _Child | None = None
        self._coordinators = 0
        self._contacts: dict[int, Contact] = {}

    def start(self, train: bytes) -> None:
        """See Fleet."""
        fabric = self._spec.parsed_fabric()
        for server in fabric.servers:
            self._servers[server] = self._spawn()
        for server, child in self._servers.items():
            child.send("server", self._place(server), self._spec, server)
        deadline = time.monotonic() + self._spec.start_s
        for server, child in self._servers.items():
            self._contacts[server] = _receive(child, server, deadline)
        for child in self._servers.values():
            child.send(self._contacts, train)
        self._start_coordinator()

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        children = {child.connection: server for server, child in self._servers.items()}
        watched = list(children)
        if self._coordinator is not None:
            watched.append(self._coordinator.connection)
        events: list[FleetEvent] = []
        for connection in wait(watched, timeout_s):
            assert isinstance(connection, Connection)
            event = (
                self._from_server(children[connection])
                if connection in children
                else self._from_coordinator(connection)
            )
            events += [event] if event else []
        return events

    def close(self) -> None:
        """See Fleet."""
        for child in [*self._servers.values(), *([self._coordinator] if self._coordinator else [])]:
            child.end()
        self._servers.clear()
        self._coordinator = None

    def _from_server(self, server: int) -> FleetEvent:
        child = self._servers[server]
        try:
            report = cloudpickle.loads(child.connection.recv_bytes())
        except (EOFError, OSError):
            child.end()
            del self._servers[server]
            why = _cause(child.process.returncode)
            if self._coordinator is not None:
                self._coordinator.send(server, why)
            return Died(server, why)
        child.process.wait()
        child.connection.close()
        del self._servers[server]
        return Reported(report)

    def _from_coordinator(self, connection: Connection[Any, Any]) -> FleetEvent | None:
        try:
            return Changed(cloudpickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            assert self._coordinator is not None
            self._coordinator.process.wait()
            crashed = self._coordinator.process.returncode != 0
            self._coordinator.end()
            self._coordinator = None
            if crashed and self._servers:
                self._start_coordinator()
            return None

    def _start_coordinator(self) -> None:
        self._coordinators += 1
        if self._coordinators > _MOST_COORDINATORS:
            raise StartError(f"the coordinator died {_MOST_COORDINATORS} times; see its errors above")
        self._coordinator = self._spawn()
        self._coordinator.send("coordinator", self._place(None), self._spec, self._contacts)

    def _on_loopback(self, server: int | None) -> Place:
        levels = self._spec.parsed_fabric().levels
        return Place() if server is None else Place(default_nics(server, levels))

    def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        # Many servers share this machine's cores: one BLAS thread each, unless the user says otherwise.
        environment = {**dict.fromkeys(_THREADS, "1"), **os.environ}
        # What the launcher can import, the user's own modules too, its processes can.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [sys.executable, "-m", "bml.cluster.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
        )
        theirs.close()
        return _Child(process, Connection(ours.detach()))


def _receive(child: _Child, server: int, deadline: float) -> Contact:
    try:
        if child.connection.poll(max(0.0, deadline - time.monotonic())):
            contact = cloudpickle.loads(child.connection.recv_bytes())
            assert isinstance(contact, Contact)
            return contact
    except (EOFError, OSError):
        raise StartError(f"server {server} died at start-up: {_cause(child.process.wait())}") from None
    raise StartError(f"server {server} did not start in time")


def _cause(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"its process was killed by signal {-returncode}"
    return f"its process exited with status {returncode}"
