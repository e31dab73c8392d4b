"""Entry of a plain process of a job: a server, or the coordinator; `python -m bml.cluster.worker FD`.

The launcher holds the other end of the socket FD. What it sends is pickled, as it is our own parent;
nothing else is ever unpickled. When the launcher is gone, so is this process.
"""

from __future__ import annotations

import os
import signal
import sys
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


def main() -> None:
    """Serve the launcher at the other end of the socket given as the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    role, place, *rest = cloudpickle.loads(connection.recv_bytes())
    if place.namespace is not None:
        namespace.enter(place.namespace)  # before any socket is opened or thread started
    if role == "server":
        _serve(connection, place, *rest)
    else:
        _coordinate(connection, *rest)


def _serve(connection: Connection[Any, Any], place: Place, spec: JobSpec, number: int) -> None:
    server = Server(spec, number, place.nics, place.control_host)
    connection.send_bytes(cloudpickle.dumps(server.contact))
    contacts, train = cloudpickle.loads(connection.recv_bytes())
    threading.Thread(target=_die_with_launcher, args=(connection,), daemon=True).start()
    report = run_training(server, contacts, cloudpickle.loads(train))
    connection.send_bytes(cloudpickle.dumps(report))


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


def _die_with_launcher(connection: Connection[Any, Any]) -> None:
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    main()
