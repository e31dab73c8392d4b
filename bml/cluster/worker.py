"""What a plain process of a job does: be a server, or the coordinator.

The launcher holds the other end of its socket. What it sends is pickled, as it is our own parent;
nothing else is ever unpickled. When the launcher is gone, so is this process.

    launcher to server     place, specification, which life; contacts and the training function; then
                           ("ask", number, request) and ("struck", fault)
    launcher to coordinator  ("gone", server, why) and ("join", server, life, contact)
    coordinator to launcher  ("beat",), a sign of life, and ("changed", snapshot)
    server to launcher     its contact; then ("answer", number, answer), ("strike", fault), ("report", report)
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from bml.cluster.coordinator import CoordinatorLoop
from bml.cluster.job import JobSpec, Place
from bml.cluster.server import Server
from bml.cluster.training import run_training
from bml.fabric import namespace
from bml.protocol import coordinator as core
from faults import Fault


def serve(descriptor: int) -> None:
    """Serve the launcher at the other end of this socket, as a server or the coordinator."""
    connection: Connection[Any, Any] = Connection(descriptor)
    role, place, *rest = cloudpickle.loads(connection.recv_bytes())
    if place.namespace is not None:
        namespace.enter(place.namespace)  # before any socket is opened or thread started
    if role == "server":
        _serve(connection, place, *rest)
    else:
        _coordinate(connection, *rest)


class _Launcher:
    """The server's end of the socket: several threads speak, one listens."""

    def __init__(self, connection: Connection[Any, Any], struck_within_s: float):
        self._connection = connection
        self._speaking = threading.Lock()
        self._struck = threading.Event()
        self._struck_within_s = struck_within_s

    def say(self, *message: Any) -> None:
        with self._speaking:
            self._connection.send_bytes(cloudpickle.dumps(message))

    def strike(self, fault: Fault) -> None:
        """Have a fault done to the cables. The server stands still meanwhile: so it strikes in its step."""
        self._struck.clear()
        self.say("strike", str(fault))
        self._struck.wait(self._struck_within_s)

    def listen(self, server: Server) -> None:
        """Pass on what the launcher asks; ends this process when it is gone."""
        try:
            while True:
                what, *rest = cloudpickle.loads(self._connection.recv_bytes())
                if what == "struck":
                    self._struck.set()
                else:
                    number, request = rest
                    server.answer(request, lambda answer, number=number: self.say("answer", number, answer))  # type: ignore[misc]
        except (EOFError, OSError):
            os._exit(1)


def _serve(
    connection: Connection[Any, Any], place: Place, spec: JobSpec, number: int, life: int | None
) -> None:
    launcher = _Launcher(connection, spec.timeouts().detect_s / 2)
    strike = None if spec.emulated is None else launcher.strike
    server = Server(spec, number, place.nics, place.control_host, strike, life)
    signal.signal(signal.SIGTERM, lambda *_: _preempted(server))
    connection.send_bytes(cloudpickle.dumps(server.contact))
    contacts, train = cloudpickle.loads(connection.recv_bytes())
    threading.Thread(target=launcher.listen, args=(server,), name="bml-launcher", daemon=True).start()
    launcher.say("report", run_training(server, contacts, cloudpickle.loads(train)))


def _preempted(server: Server) -> None:
    """The notice of a machine that is about to be taken away; the next one ends the process."""
    server.leave("it got SIGTERM, the notice that its machine is taken away")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _coordinate(
    connection: Connection[Any, Any], spec: JobSpec, contacts: Any, lives: Any, term: int
) -> None:
    def say(*message: Any) -> None:
        connection.send_bytes(cloudpickle.dumps(message))

    loop = CoordinatorLoop(spec, contacts, lives, term, lambda now: say("changed", now), lambda: say("beat"))
    threading.Thread(target=_listen, args=(connection, loop), daemon=True).start()
    loop.run()


def _listen(connection: Connection[Any, Any], loop: CoordinatorLoop) -> None:
    """Pass on what the launcher says: a process is dead, or was started to join."""
    try:
        while True:
            what, *rest = cloudpickle.loads(connection.recv_bytes())
            if what == "gone":
                loop.say(core.Gone(*rest))
            else:
                loop.join(*rest)
    except (EOFError, OSError):
        os._exit(1)
