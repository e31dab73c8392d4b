"""What a plain process of a job does: be a server, or the coordinator.

The launcher holds the other end of its socket. What it sends is pickled, as it is our own parent;
nothing else is ever unpickled. When the launcher is gone, so is this process.

    launcher to server     place and specification; contacts and the training function; then
                           ("ask", number, request) and ("struck", fault)
    server to launcher     its contact; then ("answer", number, answer), ("strike", fault), ("report", report)
"""

from __future__ import annotations

import os
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


def _serve(connection: Connection[Any, Any], place: Place, spec: JobSpec, number: int) -> None:
    launcher = _Launcher(connection, spec.timeouts().detect_s / 2)
    strike = None if spec.emulated is None else launcher.strike
    server = Server(spec, number, place.nics, place.control_host, strike)
    connection.send_bytes(cloudpickle.dumps(server.contact))
    contacts, train = cloudpickle.loads(connection.recv_bytes())
    threading.Thread(target=launcher.listen, args=(server,), name="bml-launcher", daemon=True).start()
    launcher.say("report", run_training(server, contacts, cloudpickle.loads(train)))


def _coordinate(connection: Connection[Any, Any], spec: JobSpec, contacts: Any) -> None:
    loop = CoordinatorLoop(spec, contacts, lambda now: connection.send_bytes(cloudpickle.dumps(now)))
    threading.Thread(target=_listen, args=(connection, loop), daemon=True).start()
    loop.run()


def _listen(connection: Connection[Any, Any], loop: CoordinatorLoop) -> None:
    """Pass on what the launcher noticed: (server, why) of a dead process."""
    try:
        while True:
            server, why = cloudpickle.loads(connection.recv_bytes())
            loop.say(core.Gone(server, why))
    except (EOFError, OSError):
        os._exit(1)
