"""Makes the parts of one server, in the order in which they need each other."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from bml.cluster.injection.actuators import Actuators
from bml.cluster.injection.injection import Injection
from bml.cluster.server.arrivals import Arrivals
from bml.cluster.server.execution import Execution
from bml.cluster.server.forecast import Forecast
from bml.cluster.server.line import CoordinatorLine
from bml.cluster.server.loop import ServerLoop
from bml.cluster.server.nics import Nics
from bml.cluster.server.peers import Peers
from bml.cluster.server.shell import ServerShell
from bml.cluster.spec import news
from bml.cluster.spec.job import Contact, Contacts, JobSpec
from bml.cluster.spec.trace import Trace
from bml.cluster.steps.handover import Handover
from bml.cluster.steps.host import StepHost
from bml.cluster.steps.mailbox import Mailbox
from bml.cluster.steps.runner import make_runner, programs
from bml.faults import Fault
from bml.faults.busy import Slowdown
from bml.io.poller import Poller
from bml.protocol.record.recorded import RecordedCore
from bml.protocol.record.recording import pack_part
from bml.protocol.record.setup import Setup
from bml.protocol.server import events as ev
from bml.protocol.server.watch import links_of
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header
from bml.schedule.select.choice import prepare
from bml.sharedmem import SharedPool, StatusPages
from bml.topology import Fabric
from bml.transport.choice import Opened, open_transport
from bml.transport.links.stand_in import PeersByLevel

_LOG = logging.getLogger(__name__)


class Assembly(ServerShell):
    """One server without its training thread; arguments as of bml.cluster.server.server.Server."""

    def __init__(
        self,
        spec: JobSpec,
        server: int,
        nics: Sequence[str],
        control_host: str,
        apply_to_fabric: Callable[[Fault], None] | None,
        incarnation: int | None,
        on_line: Callable[[], None],
    ):
        super().__init__()
        self._on_line = on_line
        self.n_told = 0
        """How many messages of coordinators have come."""
        fabric = spec.parsed_fabric()
        _prepare(spec, fabric)
        self.handover = Handover(joins=incarnation is not None)
        self.poller = Poller(self.take_requests, guard=threading.Lock())
        self.mailbox = Mailbox(self.poller.wake)
        self.slowdown = Slowdown(time.monotonic, self.handover.no_pauses.wait)
        self.loop = ServerLoop(self, server, fabric.n_servers)
        self.arrivals = Arrivals(self)
        self.trace = Trace(server, self.arrivals) if spec.trace else None
        self.opened = self._open(spec, server, nics, incarnation or 0)
        timeouts = spec.timeouts()
        self.stand_in = self.opened.start_stand_in(timeouts.heartbeat_s, timeouts.hold_s)
        self.line = CoordinatorLine(
            server, incarnation or 0, fabric, spec, control_host, self.poller, self._told,
            self._coordinator_lost,
        )  # fmt: skip
        _LOG.info("%s", news.line("transport", server=server, name=self.opened.name, nics=tuple(nics)))
        pages = None
        if isinstance(self.opened.memory, SharedPool):
            pages = StatusPages(server, spec.token, spec.job)
        self.peers = Peers(spec, _contact(server, self.line, self.opened, pages), self.opened)
        joins = (
            None if incarnation is None else msg.Incarnation(server, incarnation, self.peers.contact.encode())
        )
        self._spec, self._shares_memory, self._incarnation = spec, pages is not None, joins
        self.core = RecordedCore(
            server, fabric, programs(spec, pages is not None), spec.timeouts(), self.peers.slice_nbytes,
            time.monotonic(), joins, spec.kept_nbytes,
        )  # fmt: skip
        self.injection = Injection(
            spec.fault_plan(),
            fabric,
            self._actuators(server, fabric, apply_to_fabric),
            was_there=server in spec.servers,
        )
        self.runner = make_runner(spec, self._step_host(), pages)
        self.execution = Execution(
            self.core, self.opened.transport, self.runner, self.peers, self.injection, self.handover,
            self.mailbox, self.line.tell,
        )  # fmt: skip
        self.forecast = Forecast(self, spec, pages is not None)
        self.nics = Nics(server, nics, self.poller, self._carrier_changed)

    def start(self, contacts: Contacts) -> None:
        """Start the loop's thread; the coordinator may call from now on. Raises FabricError."""
        self.peers.start(contacts)
        self.runner.open(contacts)
        self.stand_in.begin(self._neighbours(contacts))
        self.loop.start()
        self.forecast.start()

    def _neighbours(self, contacts: Contacts) -> PeersByLevel:
        found: PeersByLevel = defaultdict(dict)
        for peer, level in links_of(self._spec.parsed_fabric(), self.core.server):
            if peer in contacts:
                found[level][peer] = self.peers.at(peer, level)
        return dict(found)

    def take_recording(self, why: str) -> Callable[[], bytes]:
        """Take what the flight recorder holds, under the guard; the result packs it, in any thread.

        Nothing that goes wrong in it may harm the job, so it packs b"" after any error, and logs that.
        """
        try:
            pack = self._taken(why)
        except Exception as error:
            _lost_recording(self.core.server, error)
            return bytes

        def packed() -> bytes:
            try:
                return pack()
            except Exception as error:
                _lost_recording(self.core.server, error)
                return b""

        return packed

    def _taken(self, why: str) -> Callable[[], bytes]:
        spec, now = self._spec, time.monotonic()
        setup = Setup(
            self.core.server, spec.fabric, spec.algorithm, spec.constants, self._shares_memory,
            spec.timeouts(), spec.kept_nbytes, self.peers.rate, self._incarnation, time.time() - now,
        )  # fmt: skip
        return partial(pack_part, setup, why, now, self.core.recording())

    def send_recording(self, why: str, reply: Callable[[dict[str, Any]], None]) -> None:
        """Take it, under the guard, and reply in another thread: to pack it takes long."""
        pack = self.take_recording(why)
        threading.Thread(target=lambda: reply({"recording": pack()}), daemon=True).start()

    def tell_heard(self) -> None:
        """See ServerShell."""
        self.arrivals.tell_heard()

    def slice_nbytes(self, nbytes: int) -> int:
        """See ServerShell."""
        return self.peers.slice_nbytes(nbytes)

    def predicted(self) -> dict[str, Any] | None:
        """See ServerShell."""
        return self.forecast.predicted()

    def remaining(self, now: float) -> dict[str, float] | None:
        """See ServerShell."""
        return self.forecast.remaining(now)

    def warnings(self, now: float) -> list[dict[str, Any]]:
        """See ServerShell."""
        return self.forecast.warnings(now)

    def close(self) -> None:
        """See ServerShell."""
        self.stand_in.close()
        self.forecast.close()
        self.loop.close()
        self.nics.close()
        self.line.close()
        self.opened.transport.close()
        self.poller.close()
        self.runner.close()

    def _told(self, message: msg.ToServer) -> None:
        self.n_told += 1
        self.dispatch(ev.Control(message))
        self.apply_faults()
        self._on_line()

    def _coordinator_lost(self) -> None:
        self.execution.coordinator_lost()
        self._on_line()

    def _carrier_changed(self, level: int, up: bool, why: str) -> None:
        if not up:
            self.dispatch(ev.OwnNicLost(level, why))

    # --- the parts -------------------------------------------------------------------------------

    def _open(self, spec: JobSpec, server: int, nics: Sequence[str], incarnation: int) -> Opened:
        return open_transport(
            spec.transport,
            server,
            nics,
            token=spec.token,
            job=spec.job,
            poller=self.poller,
            handler=self.trace or self.arrivals,
            connect_s=spec.timeouts().connect_s,
            incarnation=incarnation,
            nic_rate=spec.nic_rate,
            traffic_class=spec.traffic_class,
            zero_copy_servers=spec.parsed_fabric().n_servers if spec.zero_copy else 0,
            read_in_place=self.arrivals.read_in_place,
        )

    def _actuators(
        self, server: int, fabric: Fabric, apply_to_fabric: Callable[[Fault], None] | None
    ) -> Actuators:
        return Actuators(
            server, fabric, self.opened.transport, self.poller, self.line.tell, self.mailbox.throw,
            self.dispatch, self.handover.ask_to_leave, self.slowdown, apply_to_fabric,
        )  # fmt: skip

    def _step_host(self) -> StepHost:
        return StepHost(
            core=self.core,
            memory=self.opened.memory,
            mailbox=self.mailbox,
            handover=self.handover,
            faults=self.injection,
            guard=self.poller.guard,
            answer=self.loop.answer,
            execute=self._execute_beside,
            apply_faults=self._apply_faults_beside,
            beside=self.loop.in_worker_thread,
            one_host=lambda: self.peers.one_host,
            trace=self.trace,
        )

    def _execute_beside(self, instructions: Iterable[ev.Instruction]) -> None:
        """Carry out instructions in the user's thread; callbacks that they queue do not wait for the loop."""
        self.execution.execute(instructions)
        if self.poller.queued:
            self.poller.wake()

    def _apply_faults_beside(self, header: Header | None) -> None:
        with self.poller.guard:
            if header is not None:
                self.injection.saw(header)
            self.apply_faults()


def _contact(server: int, line: CoordinatorLine, opened: Opened, pages: StatusPages | None) -> Contact:
    status_page = None if pages is None else pages.own.address
    registration_page = None if opened.zero_copy is None else opened.zero_copy.address
    return Contact(
        server, line.endpoint, opened.transport.endpoints, opened.name, status_page, registration_page
    )


def _lost_recording(server: int, error: Exception) -> None:
    _LOG.warning("server %d has no recording: %s: %s", server, type(error).__name__, error)


def _prepare(spec: JobSpec, fabric: Fabric) -> None:
    """Recovery waits for the plan: have those of single failures at hand."""
    if spec.transport != "shm":
        prepare(fabric, spec.algorithm, spec.constants)
