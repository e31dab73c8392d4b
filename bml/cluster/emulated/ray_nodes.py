"""Ray on an emulated fabric: a Ray node in each server's namespace, and the server's actor on it.

They are started in an order that two cores can take: the driver with Ray's head at the switches, then the
nodes, some at a time, then the actors. All of them run in the PID namespace of their agent and end with it.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from bml.cluster.fleets.actuators import FaultListener
from bml.cluster.fleets.fleet import Answers, ApplyFault, FleetEvent, NoSpares, Patience
from bml.cluster.fleets.machines import MACHINE_FOLDER, NONE, Machines
from bml.cluster.fleets.processes import Placement
from bml.cluster.process.imports import what_we_import
from bml.cluster.process.mail import Inbox, Outbox
from bml.cluster.ray import auth as ray_auth
from bml.cluster.spec.job import JobSpec, Place, Request
from bml.errors import BmlError, FabricError, StartError
from bml.io.interruptible import Condition, Event

OnStart = Callable[[str], None]

#: Memory of a node and its actor, in bytes, and how long a node may take to start, in seconds.
_NODE_NBYTES = 350 << 20
_NODE_S = 20.0  # how long Ray may take to start on a machine, beyond its share of start_s
#: How long the last prints of the training functions may take to arrive, in seconds.
_FLUSH_S = 5.0
_ENDED_S = 2.0  # how long a machine that was asked to end may take to say so
_LOOK_S = 0.2  # how often it looks whether the start was given up
#: How many orders of a kind wait at most for a driver that does not read; in practice there are fewer.
_MOST_UNSENT = 1000
_HEAD = "switches"
_OBJECT_STORE_NBYTES = 80_000_000
_DRIVER = """
from bml.cluster.ray.quiet import quiet_ray
with quiet_ray():
    from bml.cluster.ray import driver
driver.main()
"""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # All nodes share the memory of this machine: each would count that of the others as its own.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "0",
}


class EmulatedRayFleet:
    """See bml.cluster.fleets.fleet.Fleet. `place` returns the place of a server.

    `apply_fault` breaks real cables.
    """

    def __init__(
        self, spec: JobSpec, prints: bool, place: Placement, apply_fault: ApplyFault, on_start: OnStart
    ):
        self.spec = spec.settled(one_host=False)
        self.spares = NoSpares()
        self._prints, self._apply_fault, self._on_start = prints, apply_fault, on_start
        self._head = place(None)
        self._places: Mapping[int, Place] = {each: place(each) for each in spec.parsed_fabric().servers}
        self._machines: Machines | None = None
        self._driver: _DriverEnd | None = None
        self._listener: FaultListener | None = None
        self._answered = Condition()
        self._answers: dict[int, Answers | None] = {}
        self._numbers = count(1)
        self._address = ""
        self._environment = _environment()
        self._begun = False
        self._up: set[int] = set()
        self._failed: dict[int, str] = {}
        self._events: queue.SimpleQueue[FleetEvent] = queue.SimpleQueue()
        self._replies: dict[object, Any] = {}

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._check_possible()
        began = time.monotonic()
        self._on_start("starting Ray's head")
        self._start_driver()
        self._start_nodes(self.spec.servers)
        self._on_start(
            f"{len(self._up)} Ray nodes are up after {time.monotonic() - began:.0f} s; their actors start"
        )
        self._say("start", train)
        self._raise(self._reply("started", self.spec.start_s + _NODE_S))
        self._begun = True

    def join(self, server: int, incarnation: int, give_up: Event) -> None:
        """See Fleet; if its machine is dead, it is started first."""
        if server not in self._up:
            self._start_nodes((server,), give_up)
        self._replies.pop(("joined", server), None)  # of a start that took too long
        self._say("join", server, incarnation)
        self._raise(self._reply(("joined", server), self.spec.start_s + _NODE_S, give_up))

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        if self._events.empty():
            self._listen(timeout_s)
        return [self._events.get() for _ in range(self._events.qsize())]

    def ask(self, request: Request, patience: Patience) -> Answers:
        """See Fleet."""
        number = next(self._numbers)
        with self._answered:
            self._answers[number] = None
        self._say("ask", number, request, patience)
        with self._answered:
            # The driver waits for the servers as long; its answer takes a moment more.
            self._answered.wait_for(lambda: self._answers[number] is not None, 2 * max(patience))
            return self._answers.pop(number) or {}

    def close(self) -> None:
        """See Fleet."""
        if self._prints and self._begun:
            self._begun = False
            with suppress(BmlError):
                self._say("flush")
                self._reply("flushed", _FLUSH_S)
        if self._machines is not None:
            self._machines.close()
            self._machines = None
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- starting --------------------------------------------------------------------------------

    def _check_possible(self) -> None:
        if find_spec("ray") is None:
            raise StartError(
                "Ray is not installed: pip install 'ray[default]', or use the launcher processes"
            )
        needed, free = _NODE_NBYTES * (len(self._places) + 1), _free_nbytes()
        if free < needed:
            raise StartError(
                f"{len(self._places)} Ray nodes and their head need about {needed >> 20} MiB of memory, "
                f"{free >> 20} MiB are free: use the launcher processes, or a smaller fabric"
            )

    def _start_driver(self) -> None:
        assert self._head.namespace is not None
        self._listener = FaultListener(
            Path(self._head.namespace).name, self._head.control_host, self.spec.token, self._apply_fault
        )
        ours, theirs = socket.socketpair()
        with theirs:
            self._machines = Machines((theirs.fileno(),), self._prints)
            self._driver = _DriverEnd(ours)
            command = [sys.executable, "-P", "-c", _DRIVER, str(theirs.fileno())]
            self._machines.start(_HEAD, self._head.namespace, command, self._environment, logged=False)
        self._say(self.spec, self._prints, self._head.control_host, self._places, self._listener.endpoint)
        self._address = self._reply("head", self.spec.start_s)

    def _start_nodes(self, servers: tuple[int, ...], give_up: Event | None = None) -> None:
        """Start the Ray nodes of these servers, as many at a time as there are cores."""
        to_come, starting = list(servers), set[int]()
        deadline = time.monotonic() + self.spec.start_s + _NODE_S * len(servers)
        at_a_time = max(2, len(os.sched_getaffinity(0)))
        while to_come or starting:
            while to_come and len(starting) < at_a_time:
                starting.add(to_come[0])
                self._start_node(to_come.pop(0))
            self._hear(give_up)
            for server in starting & self._failed.keys():
                raise StartError(self._failed[server])
            if starting & self._up:
                starting -= self._up
                self._on_start(f"{len(self._up)} of {len(self._places)} Ray nodes are up")
            if time.monotonic() > deadline:
                raise StartError(f"the Ray nodes of servers {sorted(starting)} did not start in time")

    def _start_node(self, server: int) -> None:
        self._failed.pop(server, None)
        place, machines = self._places[server], self._machines
        assert place.namespace is not None
        assert machines is not None
        ray = "from ray.scripts.scripts import main; main()"
        command = [
            *(sys.executable, "-P", "-c", ray, "start", "--block", f"--address={self._address}"),
            *(f"--node-ip-address={place.control_host}", f"--temp-dir={MACHINE_FOLDER}", "--num-cpus=0"),
            *(f"--object-store-memory={_OBJECT_STORE_NBYTES}", "--disable-usage-stats"),
        ]
        machines.start(str(server), place.namespace, command, self._environment, logged=True)
        self._say("await", server)

    # --- listening -------------------------------------------------------------------------------

    def _reply(self, to: object, within_s: float, give_up: Event | None = None) -> Any:
        """Wait for this answer of the driver; events meanwhile are kept for `wait`."""
        deadline = time.monotonic() + within_s
        while to not in self._replies:
            if time.monotonic() > deadline:
                raise StartError(f"Ray's driver did not answer within {within_s:.0f} s ({to})")
            self._hear(give_up)
        return self._replies.pop(to)

    def _hear(self, give_up: Event | None) -> None:
        """Listen for a moment; with `give_up`, another thread listens, in `wait`."""
        if give_up is None:
            self._listen(_LOOK_S)
        elif give_up.wait(_LOOK_S):
            raise StartError("the server was still being started when the job ended")

    def _listen(self, timeout_s: float) -> None:
        """Take the messages of the driver and of the machines."""
        machines, driver = self._machines, self._driver
        assert machines is not None
        assert driver is not None
        ready = wait([driver.sock, machines.sock], timeout_s)
        if driver.sock in ready:
            # The driver first: its messages may say why it ends. Their agent reports that it has ended.
            for message in (said := driver.inbox.take()):
                self._heard(*message)
            if said or not driver.inbox.over:
                return
            if not wait([machines.sock], _ENDED_S):
                raise FabricError("Ray's driver is gone")
        if driver.sock in ready or machines.sock in ready:
            try:
                ended = machines.hear()
            except EOFError:
                raise FabricError("the agent of the machines is gone, and all machines with it") from None
            self._machine_ended(*ended)

    def _heard(self, what: str, *rest: Any) -> None:
        match what:
            case "event" | "changed":
                self._events.put(rest[0])
            case "answer":
                with self._answered:
                    if rest[0] in self._answers:
                        self._answers[rest[0]] = rest[1]
                        self._answered.notify_all()
            case "up":
                self._up.add(rest[0])
            case "failed":
                raise rest[0]
            case "joined":
                self._replies[what, rest[0]] = rest[1]
            case _:
                self._replies[what] = rest[0]

    def _machine_ended(self, machine: str, code: int, words: str) -> None:
        why = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        said = f"; the end of its log:\n{words}" if words else ""
        if machine == NONE:
            raise FabricError(words)
        if machine == _HEAD:
            self._begun = False
            raise FabricError(f"Ray's head {why}")
        server = int(machine)
        self._failed[server] = f"the Ray node of server {server} {why}{said}"
        if server in self._up:
            self._up.discard(server)
            self._say("lost", server, f"its machine is dead: its Ray node {why}")

    # --- speaking --------------------------------------------------------------------------------

    def _say(self, *message: Any) -> None:
        driver = self._driver
        if driver is not None:  # if it is dead, the next read shows it
            driver.outbox.put(*message)

    @staticmethod
    def _raise(error: Exception | None) -> None:
        if error is not None:
            raise error


class _DriverEnd:
    """The launcher's end of the socket to Ray's driver; neither end waits for the other."""

    def __init__(self, sock: socket.socket):
        self.sock, self.inbox, self.outbox = sock, Inbox(sock), Outbox(sock, _MOST_UNSENT)

    def close(self) -> None:
        self.outbox.close()
        self.sock.close()


def _environment() -> dict[str, str]:
    """Return the environment of every machine: its cluster is that of the job, with a token of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "BML_NICS")}
    return {**kept, **_SETTINGS, **ray_auth.own_settings(kept), **what_we_import()}


def _free_nbytes() -> int:
    """Return the bytes of memory that are available without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
