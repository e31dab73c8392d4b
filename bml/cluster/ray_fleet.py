"""A job on Ray: one actor per server, the coordinator a named actor that Ray restarts.

Ray places the processes, notices their death and restarts the coordinator; it is control plane only. No
parameter byte passes through its object store or its calls: the servers' own connections carry them.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

import cloudpickle
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
from ray.util import get_node_ip_address

from bml.cluster.coordinator import CoordinatorLoop
from bml.cluster.fleet import Answers, Changed, Died, FleetEvent, Reported, Request
from bml.cluster.job import Contact, Contacts, JobSpec, default_nics
from bml.cluster.server import Server
from bml.cluster.training import run_training
from bml.errors import StartError, UsageError
from bml.protocol import coordinator as core

NAMESPACE = "bml"
_SNAPSHOT_S = 0.1
_LOOPBACK = "127.0.0.1"


class ServerActor:
    """A server of the fabric, as a Ray actor."""

    def __init__(self, spec: JobSpec, server: int, one_machine: bool, life: int | None = None):
        levels = spec.parsed_fabric().levels
        host = _LOOPBACK if one_machine else get_node_ip_address()
        self._server = Server(spec, server, nic_addresses(server, levels, host), host, life=life)

    def contact(self) -> tuple[Contact, int]:
        """Where this server can be reached, and its process id."""
        return self._server.contact, os.getpid()

    def run(self, contacts: Contacts, train: bytes) -> bytes:
        """Run the training function; returns the pickled ServerReport."""
        report = run_training(self._server, contacts, cloudpickle.loads(train))
        pickled: bytes = cloudpickle.dumps(report)
        return pickled

    def answer(self, request: Request, timeout_s: float) -> dict[str, Any] | None:
        """See Server.answer; None if the server did not answer. Runs beside `run`, in a thread of its own."""
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._server.answer(request, answers.put)
        with suppress(queue.Empty):
            return answers.get(timeout=timeout_s)
        return None


class CoordinatorActor:
    """The coordinator, as a named Ray actor. Restarted by Ray, it starts from its arguments alone."""

    def __init__(self, spec: JobSpec, contacts: Contacts):
        self._loop = CoordinatorLoop(spec, contacts, {}, lambda now: None)
        threading.Thread(target=self._loop.run, name="bml-coordinator", daemon=True).start()

    def snapshot(self) -> dict[str, Any]:
        """Where the job stands."""
        return self._loop.snapshot()

    def join(self, server: int, life: int, contact: Contact) -> None:
        """A server was started to join."""
        self._loop.join(server, life, contact)

    def gone(self, server: int, why: str) -> None:
        """Ray says that this server's actor is dead."""
        self._loop.say(core.Gone(server, why))


def nic_addresses(server: int, levels: int, host: str) -> tuple[str, ...]:
    """This machine's address for each level: the setting BML_NICS ("10.0.0.1,10.1.0.1"), else the node's.

    Raises UsageError when BML_NICS does not name one address per level.
    """
    setting = os.environ.get("BML_NICS", "")
    if setting:
        nics = tuple(address.strip() for address in setting.split(","))
        if len(nics) != levels:
            raise UsageError(
                f"BML_NICS is {setting!r}: the fabric has {levels} levels, give that many addresses"
            )
        return nics
    return default_nics(server, levels) if host == _LOOPBACK else (host,) * levels


class RayFleet:
    """See bml.cluster.fleet.Fleet. Without an address, and outside a Ray job, it starts a Ray of its own."""

    def __init__(self, spec: JobSpec, address: str | None, prints: bool):
        self._prints = prints
        self._folder: str | None = None
        self._train = b""
        self._one_machine = True
        self._contacts: dict[int, Contact] = {}
        self._lives: dict[int, int] = {}
        self._actors: dict[int, Any] = {}
        self._pids: dict[int, int] = {}
        self._runs: dict[Any, int] = {}
        self._coordinator: Any = None
        self._snapshot: Any = None
        self._snapshot_at = 0.0
        self._ours = not ray.is_initialized()
        if not self._ours:
            self._own_cluster = False
        elif address or os.environ.get("RAY_ADDRESS"):
            self._own_cluster = False
            ray.init(
                address=address or "auto",
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
                log_to_driver=prints,
            )
        else:
            self._own_cluster = True
            self._start_ray()
        self._one_machine = self._own_cluster or _is_loopback_cluster()
        self.spec = self._spec = spec.settled(self._one_machine)

    def start(self, train: bytes) -> None:
        """See Fleet."""
        self._train = train
        for server in self._spec.servers:
            self._actors[server] = self._actor(server)
        deadline = time.monotonic() + self._spec.start_s
        for server in self._actors:
            self._contacts[server] = self._contact(server, deadline)
        self._coordinator = (
            ray.remote(CoordinatorActor)
            .options(
                name=f"{self._spec.job}-coordinator",
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
            )
            .remote(self._spec, self._contacts)
        )
        for server, handle in self._actors.items():
            self._runs[handle.run.remote(self._contacts, train)] = server

    def _actor(self, server: int, life: int | None = None) -> Any:
        # SPREAD puts them on as many machines as there are; they may share one, so they reserve no CPU.
        # Two calls at a time: the training function, and whoever asks how it is going.
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 2,
            "scheduling_strategy": "SPREAD",
        }
        spec = self._spec if life is None else self._spec.for_joiner(again=server in self._lives)
        return ray.remote(ServerActor).options(**options).remote(spec, server, self._one_machine, life)

    def join(self, server: int) -> None:
        """See Fleet."""
        if server in self._actors:
            self._end(server)
        life = time.time_ns()
        self._actors[server] = self._actor(server, life)
        self._contacts[server] = self._contact(server, time.monotonic() + self._spec.start_s)
        self._lives[server] = life
        self._runs[self._actors[server].run.remote(self._contacts, self._train)] = server
        self._coordinator.join.remote(server, life, self._contacts[server])

    def _end(self, server: int) -> None:
        """End what is left of a server; a frozen one cannot hear Ray."""
        with suppress(RayError):
            ray.kill(self._actors.pop(server))
        if self._own_cluster:
            with suppress(ProcessLookupError, KeyError):
                os.kill(self._pids.pop(server), signal.SIGKILL)
        self._runs = {ref: of for ref, of in self._runs.items() if of != server}

    def wait(self, timeout_s: float) -> list[FleetEvent]:
        """See Fleet."""
        if self._snapshot is None and time.monotonic() - self._snapshot_at >= _SNAPSHOT_S:
            self._snapshot = self._coordinator.snapshot.remote()
        refs = [*self._runs, *([self._snapshot] if self._snapshot else [])]
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(timeout_s, _SNAPSHOT_S))
        events: list[FleetEvent] = []
        for ref in ready:
            event = self._snapshot_event() if ref is self._snapshot else self._run_event(ref)
            events += [event] if event else []
        return events

    def ask(self, request: Request, timeout_s: float) -> Answers:
        """See Fleet; an actor that dies of a fault may take its answer with it."""
        running = set(self._runs.values())
        asked = {
            handle.answer.remote(request, timeout_s): server
            for server, handle in list(self._actors.items())
            if server in running
        }
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        answers: dict[int, dict[str, Any]] = {}
        for ref in ready:
            try:
                answer = ray.get(ref)
            except RayActorError:
                answer = {"done": f"server {asked[ref]} died of it"} if request[0] == "inject" else None
            if answer is not None:
                answers[asked[ref]] = answer
        return answers

    def close(self) -> None:
        """See Fleet."""
        for actor in [*self._actors.values(), *([self._coordinator] if self._coordinator else [])]:
            with suppress(RayError):
                ray.kill(actor)
        self._actors.clear()
        self._coordinator = None
        if self._own_cluster:
            self._stop_ray()
        elif self._ours and ray.is_initialized():
            ray.shutdown()

    # --- events ----------------------------------------------------------------------------------

    def _snapshot_event(self) -> FleetEvent | None:
        ref, self._snapshot, self._snapshot_at = self._snapshot, None, time.monotonic()
        try:
            snapshot = ray.get(ref)
            for server, life in self._lives.items():
                if snapshot["lives"].get(server) != life:  # a restarted coordinator does not know
                    self._coordinator.join.remote(server, life, self._contacts[server])
            return Changed(snapshot)
        except ActorDiedError as error:
            raise StartError(f"the coordinator cannot be started: {error}") from None
        except RayError:
            return None  # it is being restarted

    def _run_event(self, ref: Any) -> FleetEvent:
        server = self._runs.pop(ref)
        try:
            return Reported(cloudpickle.loads(ray.get(ref)))
        except RayActorError as error:
            why = f"Ray: {str(error).splitlines()[0]}"
            self._coordinator.gone.remote(server, why)
            return Died(server, why)

    def _contact(self, server: int, deadline: float) -> Contact:
        handle = self._actors[server]
        try:
            found = ray.get(handle.contact.remote(), timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError:
            resources = ray.cluster_resources()
            raise StartError(f"Ray did not start server {server} in time; it has {resources}") from None
        except RayActorError as error:
            raise StartError(f"server {server} died at start-up: {error}") from None
        contact: Contact
        contact, self._pids[server] = found
        return contact

    # --- a Ray of our own ------------------------------------------------------------------------

    def _start_ray(self) -> None:
        # A token file that another cluster left behind would switch authentication on.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._folder = tempfile.mkdtemp(prefix="bml-ray-")
        ours = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=False,
                logging_level=logging.ERROR,
                object_store_memory=100 << 20,
                log_to_driver=self._prints,
                _temp_dir=self._folder,
            )
        except BaseException:
            self._stop_ray()
            raise
        # Ray has put its own handler there. Who had one, as the command line has, ends the job itself.
        if callable(ours) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)

    def _stop_ray(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # a frozen one cannot hear Ray
        self._pids.clear()
        if ray.is_initialized():
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _is_loopback_cluster() -> bool:
    """Whether the whole cluster is this one machine, so that loopback addresses reach everybody."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return len(nodes) == 1
