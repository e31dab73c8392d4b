"""Ray's driver and head of a job on an emulated fabric: a process at the switches, which obeys the launcher.

The launcher cannot be the driver: its process is outside of the namespaces, where no node reaches it.

    launcher    specification, whether to print, this machine's address, every server's place, where to ask
                for faults of cables; then
                ("await", server)            tell when this server's node is up
                ("start", train), ("join", server, incarnation), ("lost", server, why),
                ("ask", number, request, timeout_s)
                ("flush",)                   the job is over: have all prints printed
    driver      ("head", address)            nodes can be started
                ("up", server)               its node is there
                ("started", error or None), ("joined", server, error or None)
                ("event", event), ("changed", event), of which a slow launcher gets the newest
                ("answer", number, answers), ("failed", error), ("flushed", None)

It never waits for the launcher (bml/cluster/process/mail.py): a coordinator that dies meanwhile is replaced.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from bml.cluster.fleets.fleet import Changed, FleetEvent, Patience
from bml.cluster.fleets.machines import MACHINE_FOLDER
from bml.cluster.process.mail import Outbox, receive
from bml.cluster.ray.fleet import RayFleet
from bml.cluster.ray.machines import Machines, living_machines
from bml.cluster.ray.own import NAMESPACE, OBJECT_STORE_NBYTES
from bml.errors import BmlError, StartError
from bml.io.interruptible import Event

_POLL_S = 0.05  # how often it looks for orders beside the events of the job
#: Ray looks for prints several times a second, and does not say when it has shown them.
_PRINTS_S = 0.8
#: How long starts may take to be given up, in seconds.
_JOINING_S = 2.0
#: How many events, or snapshots, wait at most for a launcher that does not read.
_MOST_UNSENT = 1000
#: How long the launcher may take to read why this process ends, in seconds.
_LAST_WORDS_S = 5.0


class _Driver:
    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._outbox = Outbox(sock, _MOST_UNSENT)
        self._orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._awaited: set[int] = set()
        self._started = False
        self._joining: list[threading.Thread] = []
        self._give_up = Event()

    def run(self) -> None:
        spec, prints, host, places, fault_endpoint = self._hear()
        self._machines = Machines(places, fault_endpoint, _start_ray(host, prints))
        self._fleet = RayFleet(spec, None, prints, machines=self._machines)
        self.say("head", ray.get_runtime_context().gcs_address)
        threading.Thread(target=self._listen, name="bml-launcher", daemon=True).start()
        while True:
            self._obey()
            if self._awaited:
                self._look_for_nodes()
            for event in self._fleet.wait(_POLL_S) if self._started else ():
                self.tell(event)

    def say(self, *message: Any) -> None:
        """Send a message; any thread may, and never waits."""
        self._outbox.put(*message)

    def tell(self, event: FleetEvent) -> None:
        """Send an event; old snapshots make room for newer ones, and never take that of another event."""
        self.say("changed" if isinstance(event, Changed) else "event", event)

    def flush(self) -> None:
        """Give the launcher time to read all messages."""
        self._outbox.flush(_LAST_WORDS_S)

    def _hear(self) -> Any:
        return receive(self._sock)

    def _listen(self) -> None:
        """Take orders, and end this process when the launcher is gone."""
        try:
            while True:
                what, *rest = self._hear()
                if what == "ask":
                    threading.Thread(target=self._ask, args=rest, name="bml-ask", daemon=True).start()
                else:
                    self._orders.put((what, *rest))
        except (EOFError, OSError):
            os._exit(1)

    def _ask(self, number: int, request: Any, patience: Patience) -> None:
        self.say("answer", number, self._fleet.ask(request, patience))

    def _obey(self) -> None:
        """Carry out an order; wait a moment for one if there is nothing else to do."""
        try:
            what, *rest = self._orders.get(timeout=0.0 if self._started else _POLL_S)
        except queue.Empty:
            return
        match what:
            case "await":
                self._awaited.add(rest[0])
            case "start":
                self.say("started", _error_of(lambda: self._fleet.start(rest[0])))
                self._started = True
            case "join":  # in a thread, so that events of the other servers are taken meanwhile
                thread = threading.Thread(target=self._join, args=rest, name="bml-joining", daemon=True)
                self._joining = [*(each for each in self._joining if each.is_alive()), thread]
                thread.start()
            case "flush":
                self._give_up.set()
                for thread in self._joining:
                    thread.join(_JOINING_S)
                time.sleep(_PRINTS_S)
                ray.shutdown()  # this prints lines that Ray held back as repeated
                self.say("flushed", None)
                self._started = False
            case "lost":
                died = self._fleet.machine_lost(*rest)
                if died is not None:
                    self.tell(died)

    def _join(self, server: int, incarnation: int) -> None:
        try:
            self.say(
                "joined", server, _error_of(lambda: self._fleet.join(server, incarnation, self._give_up))
            )
        except Exception as error:
            self.say("failed", StartError(f"Ray's driver failed: {error!r}"))

    def _look_for_nodes(self) -> None:
        nodes = self._machines.nodes
        alive = {each.address: each.node for each in living_machines()}
        for server in sorted(self._awaited):
            found = alive.get(self._machines.places[server].control_host)
            if found is not None and found != nodes.get(server):
                nodes[server] = found
                self._awaited.discard(server)
                self.say("up", server)


def main() -> None:
    """Drive Ray for the launcher at the other end of the socket given as the first argument."""
    driver = _Driver(socket.socket(fileno=int(sys.argv[1])))
    try:
        driver.run()
    except Exception as error:
        known = isinstance(error, BmlError)
        driver.say("failed", error if known else StartError(f"Ray's driver failed: {error!r}"))
        driver.flush()
        os._exit(1)


def _start_ray(host: str, prints: bool) -> str:
    """Start the head here; return Ray's id of this node."""
    ray.init(
        address="local",
        namespace=NAMESPACE,
        include_dashboard=False,
        logging_level=logging.ERROR,
        num_cpus=0,
        object_store_memory=OBJECT_STORE_NBYTES,
        log_to_driver=prints,
        _node_ip_address=host,
        _temp_dir=MACHINE_FOLDER,
    )
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _error_of(action: Callable[[], None]) -> BmlError | None:
    try:
        action()
    except BmlError as error:
        return error
    return None
