"""The server's loop: a thread that polls sockets and clocks, asks the core and has its answers carried out.

The training function runs in another thread (bml.cluster.server.server); what it asks for comes as a
request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bml.cluster.server.carrier import CarrierWatch
from bml.cluster.server.deferral import Deferral, unbroken
from bml.cluster.server.direct import DirectSync, Shell
from bml.cluster.server.execution import Execution
from bml.cluster.server.following import Follower
from bml.cluster.server.handover import Handover
from bml.cluster.server.injection import Actuators, Injection
from bml.cluster.server.line import CoordinatorLine
from bml.cluster.server.meeting import Meeting, Reply, Signalled
from bml.cluster.server.polling_lock import PollingLock
from bml.cluster.server.rates import Rates
from bml.cluster.spec.job import Contact, Contacts, JobSpec
from bml.cluster.spec.trace import Trace
from bml.faults import Fault
from bml.io.poller import Poller
from bml.io.spin import CoreContention, n_cores, yield_core
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.step.dataflow import Buffer, Place
from bml.protocol.step.slices import LAN_RATE, on_one_host, rate_of, slice_nbytes
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Header, Kind
from bml.schedule import AnyPrograms, DirectProgram, OneProgram, Programs, Schedules
from bml.schedule.packed.packing import prepare
from bml.sharedmem import Reduction, SharedPool, StatusPages
from bml.topology import Fabric
from bml.topology.errors import BmlError, FabricError, InvariantError
from bml.transport import interface as wire
from bml.transport.choice import open_transport

_EMPTY = memoryview(bytearray())
#: Larger fabrics plan when it is needed: planning all single failures ahead would delay the start.
_MOST_PREPARED = 64


class ServerLoop:
    """The loop of one server and all that it stands on; arguments as of bml.cluster.server.server.Server.

    `guard`: one thread at a time uses the core and what it stands on, the loop's, or in `sync` over shared
    memory the user's. `direct` runs such steps, None: the servers share none. `admit`, `received`, `heard`,
    `proved` and `lost` are those of bml.transport.interface.Handler.
    """

    def __init__(
        self,
        spec: JobSpec,
        server: int,
        nics: Sequence[str],
        control_host: str,
        apply_to_fabric: Callable[[Fault], None] | None,
        incarnation: int | None,
    ):
        self.server = server
        self.fabric = spec.parsed_fabric()
        self.nics = tuple(nics)
        _prepare(spec, self.fabric)
        self._spec = spec
        self._rate = spec.nic_rate or LAN_RATE
        self.one_host = False
        """Whether all servers share one machine."""
        self.meeting = Meeting()
        self.handover = Handover(incarnation is not None)
        self.poller = Poller(on_wake=self._take_requests)
        self.guard = self.poller.guard = threading.Lock()
        self._polling_lock = PollingLock(self.poller)
        # Servers have unequal parts in most schedules: one that has less to do must not move.
        self._contention = CoreContention(server, self.fabric.n_servers, n_cores(), most_per_core=1)
        self.deferral = Deferral(self._signalled)
        self.trace = Trace(server, self) if spec.trace else None
        self.opened = open_transport(
            spec.transport,
            server,
            nics,
            token=spec.token,
            job=spec.job,
            poller=self.poller,
            handler=self.trace or self,
            connect_s=spec.timeouts().connect_s,
            incarnation=incarnation or 0,
            nic_rate=spec.nic_rate,
            traffic_class=spec.traffic_class,
            zero_copy_servers=self.fabric.n_servers if spec.zero_copy else 0,
        )
        self.transport, self.memory = self.opened.transport, self.opened.memory
        self.line = CoordinatorLine(
            server, incarnation or 0, self.fabric, spec, control_host, self.poller, self._told,
            self._coordinator_lost,
        )  # fmt: skip
        self.status_pages: StatusPages | None = None
        if isinstance(self.memory, SharedPool):
            self.status_pages = StatusPages(server, spec.token, spec.job)
        status_page = None if self.status_pages is None else self.status_pages.own.address
        self._zero_copy = self.opened.zero_copy
        registration_page = None if self._zero_copy is None else self._zero_copy.address
        self.contact = Contact(
            server,
            self.line.endpoint,
            self.transport.endpoints,
            self.opened.name,
            status_page,
            registration_page,
        )
        joins = None if incarnation is None else msg.Incarnation(server, incarnation, self.contact.encode())
        self.core = ServerCore(
            server, self.fabric, self._programs, spec.timeouts(), self._slice_nbytes, time.monotonic(), joins,
            int(spec.kept_mib * 2**20),
        )  # fmt: skip
        actuators = Actuators(
            self.transport, self.poller, self.line.tell, self.meeting.throw, self._dispatch,
            self.handover.ask_to_leave, apply_to_fabric,
        )  # fmt: skip
        self.injection = Injection(server, spec.fault_plan(), self.fabric, actuators)
        self.execution = Execution(
            self.core, self.transport, self.memory, self.injection, self.handover,
            self.meeting, self.line.tell, self.trace,
        )  # fmt: skip
        self.execution.zero_copy = self._zero_copy
        if self._zero_copy is not None:
            self._zero_copy.read_in_place = self._read_in_place
        self._execute = self.execution.execute
        self.direct: DirectSync | None = None
        if isinstance(self.memory, SharedPool) and self.status_pages is not None:
            self._share_memory(self.memory, self.status_pages)
        self.carrier = CarrierWatch(server, nics, self.poller, self._carrier_changed)
        self.rates = Rates(self.fabric.levels, time.monotonic())
        self._requests: deque[ev.Event | Callable[[], None]] = deque()
        self._texts: dict[wire.LinkKey, bytearray] = {}
        self._heard: dict[wire.LinkKey, float] = {}
        self._tick_at = time.monotonic()
        self._rests_until = 0.0
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"bml-server-{server}", daemon=True)

    # --- for other threads -----------------------------------------------------------------------

    def start(self, contacts: Contacts) -> None:
        """Start the thread; the coordinator may call from now on. Raises FabricError."""
        others = {server: contact.transport for server, contact in contacts.items()}
        if set(others.values()) != {self.opened.name}:
            raise FabricError(f"servers fell back to different transports: {others}; ask for tcp everywhere")
        self.execution.contacts = dict(contacts)
        hosts = [host for contact in contacts.values() for host, _ in contact.nics]
        self.one_host = on_one_host(hosts)
        if self._spec.nic_rate is None:
            self._rate = rate_of(hosts, self._spec.zero_copy)
        if self.status_pages is not None:
            self.status_pages.open({server: contact.status_page for server, contact in contacts.items()})
        if self._zero_copy is not None:
            self._zero_copy.meet({server: contact.registration_page for server, contact in contacts.items()})
        self._thread.start()

    def request(self, what: ev.Event | Callable[[], None]) -> None:
        """Bring an event to the core, or call something, in the loop's thread."""
        self._requests.append(what)
        self.poller.wake()

    def answer(self, what: ev.Event, yields: int = 0, beside: bool = False) -> Reply:
        """Bring an event to the core, and poll in the calling thread until there is a reply.

        Before it sleeps it looks again `yields` times, giving the processor to others in between. `beside`:
        the training thread computes meanwhile. Raises what a handler raises of a signal that comes in here.
        """
        deferral = self.deferral
        bring: ev.Event | None = what
        while True:
            deferral.look()
            try:
                reply = self._reply(bring, yields, beside)
            finally:
                if deferral.came:
                    deferral.release()
            if reply is not None:
                return reply
            bring = None

    def join(self) -> None:
        """Wait until the thread has ended."""
        self.meeting.left.wait()
        self._thread.join()

    @property
    def nbytes_copied(self) -> int:
        """Contributions that lay outside of shared memory and were copied into it, in bytes."""
        return self._reduction.nbytes_copied if self.direct is not None else 0

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        np.seterr(all="ignore")  # of this thread: an overflow is a result
        try:
            while not self._over():
                self._pass()
        except BaseException as error:  # the training thread must not wait for ever for a dead loop
            bug = error if isinstance(error, BmlError) else InvariantError(f"server {self.server}: {error!r}")
            self.execution.stop(bug)
            raise
        finally:
            with self._polling_lock:
                self.meeting.over()
                self.close()

    def close(self) -> None:
        """Let go of sockets and memory; only when the thread does not run."""
        self._polling_lock.close()
        self.carrier.close()
        self.line.close()
        self.transport.close()
        self.poller.close()
        if self.status_pages is not None:
            if self.execution.follower is not None:
                self.execution.follower.close()
            self.status_pages.close()
            self._reduction.close()

    def _over(self) -> bool:
        leave_at = self.execution.leave_at
        return leave_at is not None and time.monotonic() >= leave_at

    def _pass(self) -> None:
        self._polling_lock.rest(max(0.0, self._rests_until - time.monotonic()))
        with self._polling_lock:
            if self._crash is not None:
                raise self._crash
            self._turn(0.0)
            self._rests_until = self._due()

    @unbroken
    def _reply(self, bring: ev.Event | None, yields: int, beside: bool) -> Reply | None:
        """Bring an event, if it is not brought yet, and wait; None: a signal came, its handler is next."""
        if bring is not None:
            self._requests.append(bring)
        replies = self.meeting.replies
        while replies.empty() and self._poll_for_reply(yields, beside):
            pass
        reply = replies.get()
        return None if isinstance(reply, Signalled) else reply

    def _poll_for_reply(self, yields: int, beside: bool) -> bool:
        """Hold the polling lock until there is a reply, or a signal; returns whether the loop goes on."""
        self._polling_lock.take()
        try:
            if self._crash is None and not self.meeting.left.is_set():
                self._poll_until_reply(yields, beside)
                return True
        except BaseException as error:  # the loop's thread ends the job
            self._crash = error
            self.poller.wake()
        finally:
            self._polling_lock.give()
        return False

    def _poll_until_reply(self, yields: int, beside: bool) -> None:
        replies, left = self.meeting.replies, yields
        with self.guard:
            self.transport.beside_computation(beside)
            self._take_requests()
        self._contention.waits()
        while replies.empty():
            if left == 0:
                self._turn(max(0.0, self._due() - time.monotonic()))
                left = yields
            elif self._turn(0.0):
                self._contention.waits()
                left = yields
            else:
                left -= yield_core(self._contention)
        if self._due() < self._rests_until:
            self.poller.wake()

    def _due(self) -> float:
        """Until when, at the latest, somebody is to poll."""
        due = self._tick_at
        if self.injection.armed:
            due = min(due, self.injection.next_deadline(time.monotonic()))
        if self.execution.leave_at is not None:
            due = min(due, self.execution.leave_at)
        return min(due, self.poller.due_s)

    def _turn(self, timeout_s: float) -> int:
        """One pass of the poller, and what is due by time; the caller holds the lock. See `Poller.poll`."""
        ready = self.poller.poll(timeout_s)
        now = time.monotonic()
        if now >= self._tick_at or self.core.urgent or self.injection.armed:
            with self.guard:
                if now >= self._tick_at or self.core.urgent:
                    self._tick(now)
                self._inject()
        return ready

    def _tick(self, now: float) -> None:
        for (peer, level), heard_at in self._heard.items():
            self.core.heard(peer, level, heard_at)
        self._heard.clear()
        self.core.flows(self.transport.flows(), now)
        self._execute(self.core.handle(ev.Tick(), now))
        # Whatever happens until then, nothing is due before: a tick sends the heartbeats that are due, and
        # no silence can become suspect between two heartbeats that could not be suspect now.
        self._tick_at = self.core.next_deadline(now)
        if self.rates.due(now):
            self.rates.note(self.transport.stats(), now)

    def _take_requests(self) -> None:
        while self._requests:
            request = self._requests.popleft()
            if callable(request):
                request()
                continue
            self._dispatch(request)
            if isinstance(request, ev.Ended):
                self.execution.user_ended()

    def _inject(self) -> None:
        """Apply the faults that are due; called wherever something may have brought a moment of the plan."""
        if self.injection.armed:
            self.injection.poll(self.core, time.monotonic())

    def _dispatch(self, event: ev.Event) -> None:
        self._execute(self.core.handle(event, time.monotonic()))

    # --- what the core and its steps are made with -----------------------------------------------

    def _programs(self, fabric: Fabric, server: int) -> AnyPrograms:
        if self.direct is not None:
            return OneProgram(DirectProgram(server, fabric.servers))
        return Programs(Schedules(fabric, self._spec.algorithm, self._spec.constants), server)

    def _slice_nbytes(self, nbytes: int) -> int:
        return slice_nbytes(nbytes, self._rate)

    def _share_memory(self, pool: SharedPool, pages: StatusPages) -> None:
        self._reduction = Reduction(pages, pool)
        shell = Shell(
            self.core,
            self.guard,
            self.meeting.replies,
            self._execute_beside,
            injection=self.injection,
            stopped=lambda: self.meeting.error is not None or self.meeting.left.is_set(),
            apply_faults=self._apply_faults,
            deferral=self.deferral,
        )
        give_up_s = self._spec.timeouts().orphan_s
        self.direct = self.execution.direct = DirectSync(pages, self._reduction, shell, give_up_s)
        if self.handover.joins:
            self.execution.follower = Follower(self.direct, self.handover.keep, self._cannot_follow)

    def _execute_beside(self, instructions: Iterable[ev.Instruction]) -> None:
        """Carry out instructions in the user's thread; what they queued must not wait for the loop's."""
        self._execute(instructions)
        if self.poller.queued:
            self.poller.wake()

    def _signalled(self) -> None:
        self.poller.wake()
        self.meeting.replies.put(Signalled())

    def _apply_faults(self, header: Header | None) -> None:
        with self.guard:
            if header is not None:
                self.injection.saw(header)
            self._inject()

    def _cannot_follow(self, error: BmlError) -> None:
        """The training function of a joiner is not to wait for what will not come; any thread may say so."""
        self.meeting.throw(error)
        self.handover.fail(error)

    # --- the transport's handler -----------------------------------------------------------------

    def admit(self, peer: int, level: int, header: Header) -> memoryview | wire.Verdict:
        """See bml.transport.interface.Handler."""
        verdict = self.core.admit(peer, header)
        if isinstance(verdict, Place):
            if verdict.buffer == Buffer.STATE:
                return self.handover.incoming(verdict, header.nbytes)
            workspace = self.execution.workspace
            assert workspace is not None
            return workspace.view(verdict, header.stop - header.start)
        if verdict is ev.Verdict.TOKEN:
            return _EMPTY
        if verdict is ev.Verdict.TEXT:
            self._texts[peer, level] = bytearray(header.nbytes)
            return memoryview(self._texts[peer, level])
        return wire.WAIT if verdict is ev.Verdict.WAIT else wire.DROP

    def _read_in_place(self, header: Header, referenced: memoryview) -> bool:
        """See ZeroCopy.read_in_place (bml.sharedmem.zero_copy); what it reads stays until the sum is made."""
        place = self.core.term(header)
        if place is None:
            return False
        assert self.execution.workspace is not None
        self.execution.workspace.refer(place, referenced)
        return True

    def received(self, peer: int, level: int, header: Header) -> None:
        """See bml.transport.interface.Handler."""
        text = ""
        if header.kind in (Kind.DESCRIBE, Kind.HEAD):
            text = self._texts.pop((peer, level)).decode(errors="replace")
        armed = self.injection.armed
        if armed:
            self.injection.saw(header)
        self._execute(self.core.received(peer, header, text, time.monotonic()))
        if armed:
            self._inject()

    def heard(self, peer: int, level: int) -> None:
        """See bml.transport.interface.Handler."""
        self._heard[peer, level] = time.monotonic()  # the core asks for it at its next tick

    def lost(self, peer: int, level: int, kind: str, why: str) -> None:
        """See bml.transport.interface.Handler."""
        self._dispatch(ev.PeerLost(peer, level, kind, why))

    def proved(self, peer: int, level: int) -> None:
        """See bml.transport.interface.Handler."""
        self._dispatch(ev.Proved(peer, level))

    # --- the coordinator and the NICs ------------------------------------------------------------

    def _told(self, message: msg.ToServer) -> None:
        self._dispatch(ev.Control(message))
        self._inject()

    def _coordinator_lost(self) -> None:
        if self.execution.leave_at is not None:
            self.execution.leave_at = 0.0  # it has heard our last word

    def _carrier_changed(self, level: int, up: bool, why: str) -> None:
        if not up:
            self._dispatch(ev.OwnNicLost(level, why))


def _prepare(spec: JobSpec, fabric: Fabric) -> None:
    """Recovery waits for the plan: have those of single failures at hand."""
    few = fabric.n_servers <= _MOST_PREPARED and spec.transport != "shm"
    if few and spec.algorithm in ("auto", "packed"):
        prepare(fabric)
