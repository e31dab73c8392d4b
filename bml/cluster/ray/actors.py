"""The actors of a job on Ray: one that is a server, and one that is the coordinator."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle
import ray
from ray.util import get_node_ip_address

from bml.cluster.fleets.actuators import apply_fault_through
from bml.cluster.fleets.handles import ProcessId, this_process
from bml.cluster.process.coordinator import CoordinatorHost
from bml.cluster.process.exiting import end_children, end_process
from bml.cluster.process.preemption import leave_on_sigterm
from bml.cluster.process.remaining import flush_files
from bml.cluster.process.training import load, run_training
from bml.cluster.ray.publishing import Publisher
from bml.cluster.ray.watching.absence import rays_patience_s
from bml.cluster.ray.watching.head import HeadWatch
from bml.cluster.server.carrier import networks
from bml.cluster.server.server import Server
from bml.cluster.spec.job import Contact, Contacts, Endpoint, JobSpec, Place, Request, default_nics
from bml.cluster.spec.nics import nics_of
from bml.errors import BmlError, FabricError, UsageError
from bml.io.interruptible import Event

LOOPBACK = "127.0.0.1"
#: How long the launcher may take to fetch a report when Ray's head is gone, in seconds.
_FETCHED_S = 5.0
_ANSWERED_S = 0.5  # so that Ray delivers the answer to the last call before the process ends
#: Of the time that Ray does without a head, for how much servers that leave wait for the others to agree.
_COURTESY = 0.1


class ServerActor:
    """A server of the fabric, as a Ray actor. Without a `place` it has the addresses of its node."""

    def __init__(
        self,
        spec: JobSpec,
        server: int,
        place: Place | None,
        incarnation: int | None = None,
        fault_endpoint: Endpoint | None = None,
    ):
        host = get_node_ip_address() if place is None else place.control_host
        apply_to_fabric = fault_endpoint and apply_fault_through(
            fault_endpoint, spec.token, spec.timeouts().detect_s / 2
        )
        self._runs = threading.Lock()
        self._report: bytes | None = None
        self._obstacle: BmlError | None = None
        try:
            nics = (place and place.nics) or nic_addresses(server, spec.parsed_fabric().levels, host)
            self._server = Server(spec, server, nics, host, apply_to_fabric or None, incarnation)
        except (FabricError, UsageError) as error:  # Ray would print a page about it
            self._obstacle = error
            return
        leave_on_sigterm(self._server)
        if spec.metrics_on_ray:
            Publisher(self._server)
        if place is None:  # on machines of their own
            HeadWatch.of_this_cluster(self._leave_without_head)

    def contact(self) -> tuple[Contact | BmlError, ProcessId]:
        """Return the addresses of this server, or why it has none, and its process."""
        return self._obstacle or self._server.contact, this_process()

    def node(self) -> str:
        """Return Ray's id of the node on which it is."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def run(self, contacts: Contacts, train: bytes) -> bytes:
        """Run the training function, once; returns the pickled ServerReport.

        The launcher asks again if Ray has lost the answer, or has never asked.
        """
        with self._runs:
            if self._report is None:
                try:
                    # Ray's thread is a daemon, and so would be all threads that the training function begins.
                    threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
                    report = run_training(self._server, contacts, train)
                    flush_files()
                    self._report = cloudpickle.dumps(report)
                except BaseException as error:  # an error of the runtime: a death, as of any process
                    end_process(error)
                end_children()  # Ray ends this process with SIGKILL, and the children would stay
            return self._report

    def _leave_without_head(self, why: str) -> None:
        """Leave, and end this process: Ray's own processes end later, and nobody else will do it."""
        self._server.leave(why)
        later = threading.Timer(_COURTESY * rays_patience_s(os.environ), self._server.abandon, (why,))
        later.daemon = True  # the end of the training function waits for others
        later.start()
        with self._runs:  # until the training function has ended
            pass
        time.sleep(_FETCHED_S)
        exit_actor()

    def exit(self) -> None:
        """End this process in a moment; without its head, Ray does not."""
        exit_actor(_ANSWERED_S)

    def relay(self, other: Any, contacts: Contacts, train: bytes) -> bytes:
        """Return the report of another server's actor, for a launcher that Ray does not connect to it."""
        report: bytes = ray.get(other.run.remote(contacts, train))
        return report

    def end_children(self) -> None:
        """End the children of this process, as the job is being ended."""
        end_children()

    def answer(self, request: Request, timeout_s: float) -> dict[str, Any] | None:
        """See Server.answer; None if the server did not answer. It runs beside `run`, in another thread."""
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._server.answer(request, answers.put)
        with suppress(queue.Empty):
            return answers.get(timeout=timeout_s)
        return None


def exit_actor(after_s: float = 0.0) -> None:
    """End this process, its daemonic children first, so that its caller still gets an answer."""

    def end() -> None:
        end_children()
        os._exit(0)

    threading.Timer(after_s, end).start()


class SpareReady(NamedTuple):
    """The first word of a spare; `node` is the id of its Ray node. `networks`: see spare_places.Waiting."""

    networks: tuple[str, ...] | None
    process: ProcessId
    node: str


class SpareActor(ServerActor):
    """A spare, as a Ray actor: it loads the training function, and waits until it becomes a server."""

    def __init__(self, spec: JobSpec, place: Place | None, train: bytes):
        self._became = Event()
        self._networks = None if place else _own_networks(spec)
        leave_on_sigterm(self)  # here, as only the main thread may
        load(train)

    def ready(self) -> SpareReady:
        """Return its networks, its process and its node."""
        return SpareReady(self._networks, this_process(), self.node())

    def stand_by(self) -> None:
        """Return when it has become a server; until then Ray tells of its death."""
        self._became.wait()

    def become(
        self,
        spec: JobSpec,
        server: int,
        place: Place | None,
        incarnation: int | None = None,
        fault_endpoint: Endpoint | None = None,
    ) -> None:
        """Become this server."""
        try:
            super().__init__(spec, server, place, incarnation, fault_endpoint)
        finally:
            self._became.set()

    def contact(self) -> tuple[Contact | BmlError, ProcessId]:
        """See ServerActor; waits until it is a server."""
        self._became.wait()
        return super().contact()

    def leave(self, why: str) -> None:
        """Let the server leave; a spare that is none ends."""
        if self._became.is_set() and self._obstacle is None:
            self._server.leave(why)
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def _own_networks(spec: JobSpec) -> tuple[str, ...] | None:
    try:
        return networks(nic_addresses(None, spec.parsed_fabric().levels, get_node_ip_address()))
    except UsageError:  # it is said when the spare becomes a server
        return None


class Said(NamedTuple):
    """The answer of a coordinator's actor; `heartbeats` counts the signs of life of its loop."""

    snapshots: list[dict[str, Any]]
    """The last snapshot of every view since the last request; the newest is the present one, if any."""
    process: ProcessId
    heartbeats: int
    ended: bool


class CoordinatorActor:
    """A coordinator, as a named Ray actor. Its launcher starts another one if it dies or falls silent.

    The actor may answer although its loop does not run, so the loop counts its own signs of life. `begin` is
    called first, when the actor's process has started.
    """

    def __init__(self) -> None:
        self._host = CoordinatorHost(self._hear, lambda: None, asked_for_snapshots=True)
        self._job = ""
        self._heartbeats = 0
        self._ended = False
        self._views: dict[int, dict[str, Any]] = {}
        self._newest: list[dict[str, Any]] = []

    def begin(self, spec: JobSpec, contacts: Contacts, incarnations: Mapping[int, int], term: int) -> None:
        """Start coordinating. If the coordinator fails, this process ends."""
        self._job = spec.job
        self._host.take("start", spec.job, spec, contacts, incarnations, term)

    def _hear(self, what: str, *rest: Any) -> None:
        match what:
            case "alive":
                self._heartbeats += 1
            case "changed":
                self._views[rest[-1]["epoch"]] = rest[-1]
                self._newest = [rest[-1]]
            case "ended":
                self._ended = True

    def said(self) -> Said:
        """Return the state of the job, and the signs of life of the coordinator."""
        ended, views = self._ended, self._views
        self._views = {}
        views.update({now["epoch"]: now for now in self._newest})  # an answer before this one may be lost
        return Said([views[epoch] for epoch in sorted(views)], this_process(), self._heartbeats, ended)

    def exit(self) -> None:
        """End this process in a moment; without its head, Ray does not."""
        exit_actor(_ANSWERED_S)

    def join(self, server: int, incarnation: int, contact: Contact) -> None:
        """Tell the coordinator that a server was started to join."""
        self._host.take("join", self._job, server, incarnation, contact)

    def gone(self, server: int, why: str) -> None:
        """Tell the coordinator that Ray reports the actor of this server dead."""
        self._host.take("gone", self._job, server, why)


def nic_addresses(server: int | None, levels: int, host: str) -> tuple[str, ...]:
    """Return this machine's address for each level: those of BML_NICS, else the node's.

    Raises UsageError, also if BML_NICS depends on the number of the server and there is none yet.
    """
    default = default_nics(server or 0, levels) if host == LOOPBACK else (host,) * levels
    return nics_of(os.environ, levels, server) or default
