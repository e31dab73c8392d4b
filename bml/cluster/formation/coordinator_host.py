"""The process in which the coordinators of a rank run: a fresh interpreter that imports only what they need.

The rank holds the other end of its socket; nothing else is ever unpickled. The process ends
when the rank is gone.

    rank to process   ("start", group, specification, contacts, incarnations, term)
                      ("join", group, server, incarnation, contact)
    process to rank   ("ready",); ("alive",), a sign of life; ("ended", group, term, which one deposed it)
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping

from bml.cluster.process.coordinator import CoordinatorLoop
from bml.cluster.process.logs import LogsAside
from bml.cluster.process.mail import Outbox, receive
from bml.cluster.spec.job import Contacts, JobSpec

ALIVE_EVERY_S = 0.25
"""How often it gives a sign of life, in seconds."""
_MOST_UNSENT = 1000


class CoordinatorHost:
    """The coordinators of one rank, one for each of its groups, each in a thread of its own."""

    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self._loops: dict[str, CoordinatorLoop] = {}

    def start(
        self, group: str, spec: JobSpec, contacts: Contacts, incarnations: Mapping[int, int], term: int
    ) -> None:
        """Start a coordinator; an older one of this group ends by itself, as the servers depose it."""
        loop = CoordinatorLoop(spec, contacts, incarnations, term, lambda snapshot: None, lambda: None)
        self._loops[group] = loop
        name = f"bml-coordinator-{group}"
        threading.Thread(target=self._run, args=(group, loop, term), name=name, daemon=True).start()

    def join(self, group: str, server: int, incarnation: int, contact: object) -> None:
        """Tell a coordinator where a joiner is reached."""
        loop = self._loops.get(group)
        if loop is not None:
            loop.join(server, incarnation, contact)  # type: ignore[arg-type]

    def _run(self, group: str, loop: CoordinatorLoop, term: int) -> None:
        try:
            loop.run()
        except BaseException:  # its lines must not stay open: the servers would wait for it
            traceback.print_exc()
            os._exit(1)
        self._outbox.put("ended", group, term, loop.deposed_by)


def main() -> None:
    """Run coordinators for the rank at the other end of the socket given as the first argument."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the rank
    sock = socket.socket(fileno=int(sys.argv[1]))
    LogsAside().start()
    outbox = Outbox(sock, _MOST_UNSENT)
    coordinator_host = CoordinatorHost(outbox)
    outbox.put("ready")
    threading.Thread(target=_say_alive, args=(outbox,), name="bml-alive", daemon=True).start()
    try:
        while True:
            what, *rest = receive(sock)
            (coordinator_host.start if what == "start" else coordinator_host.join)(*rest)
    except (EOFError, OSError):
        os._exit(0)


def _say_alive(outbox: Outbox) -> None:
    while True:
        time.sleep(ALIVE_EVERY_S)
        outbox.put("alive")
