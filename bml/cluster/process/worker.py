"""The program of a plain process of a job: it is a server, or runs the coordinator.

It is a spare before, if it was started to take the place of a server that is lost.

The launcher holds the other end of its socket. Messages of the launcher, its own parent, are pickled; nothing
else is ever unpickled. When the launcher is gone, this process ends.

    launcher to spare      place, training function; later what it says to any server
    launcher to server     place, specification, which incarnation; contacts and the training function; then
                           ("ask", number, request) and ("applied",)
                           ("end",), before it hangs up
    launcher to coordinator  place; then see bml.cluster.process.coordinator
    server to launcher     its contact, or the error for which it cannot start; then
                           ("answer", number, answer), ("apply", fault), ("report", report)
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from typing import Any

from bml.cluster.process import coordinator
from bml.cluster.process.exiting import end_children
from bml.cluster.process.logs import LogsAside
from bml.cluster.process.mail import Outbox, receive
from bml.cluster.process.preemption import leave_on_sigterm
from bml.cluster.process.remaining import flush_files
from bml.cluster.process.training import load, run_training
from bml.cluster.server.server import Server
from bml.cluster.spec.ending import WRITING_S
from bml.cluster.spec.job import JobSpec, Place
from bml.errors import FabricError, UsageError
from bml.fabric import namespace
from bml.faults import Fault
from bml.io.forks import close_on_fork
from bml.io.interruptible import Event

#: How many messages wait at most for a launcher that does not read; it stops asking long before.
_MOST_UNSENT = 100
#: How long the last logs may take to be written, in seconds.
_LAST_LOGS_S = 1.0


def serve(descriptor: int) -> None:
    """Serve the launcher at the other end of this socket, as a server or the coordinator.

    A spare waits until the launcher says which server it is.
    """
    sock = close_on_fork(socket.socket(fileno=descriptor))
    try:
        role, place, *rest = _told(sock)
        if role == "spare":
            load(*rest)
            role, place, *rest = _told(sock)
    except (EOFError, OSError):
        sock.close()
        return  # the job has ended, or the launcher has gone, before it said anything
    if place.namespace is not None:
        namespace.enter(place.namespace)  # before any socket is opened or thread started
    if role == "coordinator":
        coordinator.serve(sock, asked_for_snapshots=True)
    logs = LogsAside()
    logs.start()
    try:
        _serve(sock, place, *rest)
    finally:
        logs.drain(_LAST_LOGS_S)


def _told(sock: socket.socket) -> Any:
    """Return what a process needs to begin. Raises EOFError if the job ends before, or the launcher goes."""
    message = receive(sock)
    if message[0] == "end":
        raise EOFError
    return message


class _Launcher:
    """The server's end of the socket: several threads send, and never wait; one receives."""

    def __init__(self, sock: socket.socket, applied_within_s: float):
        self._sock = sock
        self._outbox = Outbox(sock, _MOST_UNSENT)
        self._applied = Event()
        self._applied_within_s = applied_within_s

    def say(self, *message: Any) -> None:
        self._outbox.put(*message)

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self._outbox.flush()

    def apply_to_fabric(self, fault: Fault) -> None:
        """Let the launcher apply a fault to cables. The server waits meanwhile, so it strikes in its step."""
        self._applied.clear()
        self.say("apply", str(fault))
        self._applied.wait(self._applied_within_s)

    def listen(self, server: Server, keeps: bool) -> None:
        """Pass on the launcher's requests, and end this process when the launcher ends the job, or is gone.

        If the job `keeps` checkpoints, and the launcher is gone, the server leaves before, in WRITING_S.
        """
        try:
            while True:
                what, *rest = receive(self._sock)
                if what == "end":
                    keeps = False
                elif what == "applied":
                    self._applied.set()
                else:
                    number, request = rest
                    server.answer(request, lambda answer, number=number: self.say("answer", number, answer))  # type: ignore[misc]
        except (EOFError, OSError):
            if keeps:
                server.abandon("its launcher is gone")
                time.sleep(WRITING_S)  # the process ends with its training thread
            end_children()
            os._exit(1)


def _serve(sock: socket.socket, place: Place, spec: JobSpec, number: int, incarnation: int | None) -> None:
    launcher = _Launcher(sock, spec.timeouts().detect_s / 2)
    apply_to_fabric = None if spec.emulated is None else launcher.apply_to_fabric
    try:
        server = Server(spec, number, place.nics, place.control_host, apply_to_fabric, incarnation)
    except (FabricError, UsageError) as error:
        launcher.say(error)
        launcher.flush()
        return
    leave_on_sigterm(server)
    launcher.say(server.contact)
    try:
        contacts, train = _told(sock)
    except (EOFError, OSError):
        return  # the job does not begin, or begins without this server
    listening = (server, bool(spec.keeping.folder))
    threading.Thread(target=launcher.listen, args=listening, name="bml-launcher", daemon=True).start()
    report = run_training(server, contacts, train, atexit._run_exitfuncs)
    flush_files()
    launcher.say("report", report)
    launcher.flush()
