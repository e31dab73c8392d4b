"""The server's shell: one thread that owns sockets and memory and carries out what the core says.

The training function runs in another thread (or the process's main one) and meets this thread in `sync`
alone: it brings a contribution and gets a result, or is told to prepare it again for a new view.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy.typing as npt

from bml.cluster.carrier import CarrierWatch
from bml.cluster.fleet import Request
from bml.cluster.handover import Handover
from bml.cluster.injection import Hands, Injection
from bml.cluster.job import Contact, Contacts, JobSpec
from bml.cluster.rates import Rates
from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.call import Call, neutral
from bml.protocol.engine import Buffer, Place, Reduce, Send
from bml.protocol.frame import Header, Kind
from bml.protocol.server import ServerCore
from bml.protocol.transfer import Rope
from bml.protocol.workspace import Array, Workspace
from bml.schedule import Programs, Schedules
from bml.schedule.packed import prepare
from bml.train.communicator import Committed, Outcome, Retried
from bml.transport import control
from bml.transport import interface as wire
from bml.transport.auth import Hello
from bml.transport.choice import open_transport
from bml.transport.poller import Poller
from faults import Fault
from topology import Fabric
from topology.errors import BmlError, FabricError, InvariantError

_TEXT_PRIORITY = -2
_EMPTY = memoryview(bytearray())
_COUNTERS = ("nbytes_sent", "nbytes_received", "nbytes_copied_sent", "nbytes_copied_received")
_SLICE_NBYTES = 256 << 10
#: How long after `Leave` the loop still delivers what it has said, in seconds.
_LINGER_S = 0.2
#: Larger fabrics plan when it is needed: planning all single failures ahead would delay the start.
_MOST_PREPARED = 64


class Server:
    """One server of a job on this machine. `contact` is known at once; `start` needs everybody's.

    `nics` are this server's own addresses, one per level. `life` numbers those of a server that joins a running
    job, None: it is one of those with which the job begins. `strike` does a fault to real cables and returns
    when it is done; None where there are none.
    """

    def __init__(
        self,
        spec: JobSpec,
        server: int,
        nics: Sequence[str],
        control_host: str = "127.0.0.1",
        strike: Callable[[Fault], None] | None = None,
        life: int | None = None,
    ):
        self.server = server
        self.fabric = spec.parsed_fabric()
        # Recovery waits for the plan: have those of single failures at hand.
        if self.fabric.n_servers <= _MOST_PREPARED and spec.algorithm in ("auto", "packed"):
            prepare(self.fabric)
        self._spec = spec
        self._poller = Poller(on_wake=self._take_requests)
        self._opened = open_transport(
            spec.transport,
            server,
            nics,
            token=spec.token,
            job=spec.job,
            poller=self._poller,
            handler=self,
            connect_s=spec.timeouts().connect_s,
            traffic_class=spec.traffic_class,
        )
        self._transport, self._memory = self._opened.transport, self._opened.memory
        self._listener = control.ControlListener(
            control_host,
            token=spec.token,
            job=spec.job,
            poller=self._poller,
            on_connect=self._coordinator_connected,
            server=server,
        )
        self.contact = Contact(server, self._listener.endpoint, self._transport.endpoints, self._opened.name)
        joins = None if life is None else msg.Life(server, life, self.contact.encode())
        self._core = ServerCore(
            server, self.fabric, self._programs, spec.timeouts(), _SLICE_NBYTES, time.monotonic(), joins
        )
        self._contacts: dict[int, Contact] = {}
        self._handover = Handover(life is not None)
        self._channel: control.Channel | None = None
        hands = Hands(self._transport, self._poller, self._tell, self._throw, self._feel, self.leave, strike)
        self._injection = Injection(server, spec.fault_plan(), self.fabric, hands)
        self._carrier = CarrierWatch(server, nics, self._poller, self._carrier_changed)
        self._rates = Rates(self.fabric.levels, time.monotonic())
        self._nics = tuple(nics)
        self._requests: deque[ev.Event | Callable[[], None]] = deque()
        self._replies: queue.SimpleQueue[Outcome | ev.Prepare | Exception] = queue.SimpleQueue()
        self._thrown: Exception | None = None
        self._syncing = False
        self._contribution: tuple[Array, str] | None = None
        self._workspace: Workspace | None = None
        self._texts: dict[wire.LinkKey, bytearray] = {}
        self._error: BmlError | None = None
        self._in_force = threading.Event()
        self._left = threading.Event()
        self._leave_at: float | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"bml-server-{server}", daemon=True)
        self.commit_at_s: list[float] = []

    # --- for the training thread -----------------------------------------------------------------

    def start(self, contacts: Contacts) -> None:
        """Start the loop; the coordinator may call from now on."""
        others = {server: contact.transport for server, contact in contacts.items()}
        if set(others.values()) != {self._opened.name}:
            raise FabricError(f"servers fell back to different transports: {others}; ask for tcp everywhere")
        self._contacts = dict(contacts)
        self._thread.start()

    def wait_for_view(self) -> msg.View:
        """Wait until the first view is in force; raises the error that ended the job before."""
        self._in_force.wait()
        if self._error:
            raise self._error
        return self.view

    @property
    def view(self) -> msg.View:
        """The view in force."""
        view = self._core.view
        assert view is not None
        return view

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array in memory that the transport sends from without a copy."""
        return self._memory.empty(shape, dtype)

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers with which the job began, lost ones too."""
        return self._spec.servers

    def joined(self) -> memoryview | None:
        """The training state, if this server joined a running job; waits until it is here.

        Raises the error that ended the job before, FabricError if the state was damaged on its way.
        """
        return self._handover.take()

    def boundary(self, state: Callable[[], Rope]) -> None:
        """Between two steps: joiners are given `state()`, if there are any.

        Raises the error that ends the job here if this server was asked to leave.
        """
        if self._handover.leaves:
            self._request(ev.Go(self._handover.leaves))
            self._answer()
        if self._handover.first_boundary():
            self._request(ev.Gives())
        given = self._handover.give(self._core.giving, state)
        if given is not None:
            self._request(given)

    def sync(self, epoch: int, contribution: Array, op: str, text: str, signature: int) -> Outcome:
        """Bring this server's contribution to the next step, prepared for view `epoch`.

        `contribution` is one-dimensional and contiguous, and is only read. Returns the result once the
        step is committed by everybody, or says for which view to prepare it again. Raises the error
        that ends the job.
        """
        if self._error:
            raise self._error
        self._syncing = True
        if self._thrown:
            raise self._thrown
        self._contribution = (contribution, op)
        self._plan(contribution.nbytes)
        call = Call(op, contribution.dtype.str, contribution.size, text)
        self._request(ev.Submit(self._handover.step, epoch, call, signature))
        reply = self._answer()
        self._syncing = False
        if isinstance(reply, Committed):
            self._handover.step = reply.step + 1
        return reply

    def _request(self, event: ev.Event) -> None:
        self._requests.append(event)
        self._poller.wake()

    def _answer(self) -> Outcome:
        while True:
            reply = self._replies.get()
            if isinstance(reply, Exception):
                raise reply
            if not isinstance(reply, ev.Prepare):
                return reply
            self._plan(reply.nbytes)
            self._request(ev.Prepared(reply.epoch))

    def _plan(self, nbytes: int) -> None:
        """Plan in the training thread, so that the loop's goes on sending heartbeats.

        If another view comes in force meanwhile, the step is tried again.
        """
        if self._core.programs:
            self._core.programs.for_nbytes(nbytes)

    def leave(self, why: str) -> None:
        """Ask this server to go: its training function stops before the next step, and no work is lost."""
        self._handover.leaves = why

    @property
    def contributes(self) -> bool:
        """Whether it is no joiner, or one that is in."""
        view = self._core.view
        joins = self._handover.joins
        return not joins or (view is not None and self.server in view.contributors)

    @property
    def leaves(self) -> bool:
        """Whether it was asked to go."""
        return bool(self._handover.leaves)

    def end(self, outcome: str, error: str = "") -> None:
        """Say that the training function ended, then serve the others until all are done."""
        self._request(ev.Ended(outcome, error))
        self._left.wait()
        self._thread.join()

    @property
    def error(self) -> BmlError | None:
        """What ended the job early, if anything did."""
        return self._error

    def view_records(self) -> list[dict[str, object]]:
        """The views this server lived through, for the report."""
        return [
            {
                "epoch": record.view.epoch,
                "members": list(record.view.members),
                "failures": list(record.view.failures),
                "commit": record.view.commit,
                "reason": record.view.reason,
                "detect_s": record.view.detect_s,
                "recover_s": record.recover_s,
            }
            for record in self._core.views
        ]

    def link_stats(self) -> dict[str, dict[str, int]]:
        """Counters per "peer/level"."""
        return {
            f"{peer}/{level}": stats._asdict() for (peer, level), stats in self._transport.stats().items()
        }

    # --- for whoever looks at it from outside ----------------------------------------------------

    def answer(self, request: Request, reply: Callable[[dict[str, Any]], None]) -> None:
        """Answer a request of any thread, in the loop's; silence when the loop does not run.

        "status": where this server stands (see `_status`). "inject": `{"done": what it will do to itself}`,
        said before it is done, `""` if it is no matter of this server's; `{"error": why}`.
        """

        def carry_out() -> None:
            try:
                what, argument = request
                now = time.monotonic()
                if what == "inject":
                    reply({"done": self._injection.add(argument, self._core, now)})
                else:
                    reply(self._status(now))
            except BmlError as error:
                reply({"error": str(error)})

        self._requests.append(carry_out)
        self._poller.wake()

    def _status(self, now: float) -> dict[str, Any]:
        carriers = self._carrier.watched
        stats = self._transport.stats()
        traffic = self._rates.traffic(stats, now)
        return {
            "process": os.getpid(),
            "epoch": self._core.epoch,
            "step": self._core.step,
            "phase": self._injection.phase(self._core),
            "progress": self._core.progress,
            "transport": {
                "name": self._opened.name,
                "traffic_class": self._opened.traffic_class,
                "devices": list(self._opened.devices),
                "fallback": self._opened.fallback,
                **{each: sum(getattr(link, each) for link in stats.values()) for each in _COUNTERS},
            },
            "waits_for": self._core.waits_for(),
            "suspects": [
                {"peer": each.peer, "level": each.level, "kind": each.kind, "why": each.why}
                for each in self._core.suspicions
            ],
            "nics": [
                {"level": level, "address": address, "carrier": carriers.get(level), **asdict(nic)}
                for level, (address, nic) in enumerate(zip(self._nics, traffic, strict=True))
            ],
            "faults": [str(fault) for fault in self._injection.pending],
        }

    # --- the loop --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over():
                self._pass()
        except BaseException as error:  # the training thread must not wait for ever for a dead loop
            bug = error if isinstance(error, BmlError) else InvariantError(f"server {self.server}: {error!r}")
            self._stop(bug)
            raise
        finally:
            self._left.set()
            self._in_force.set()
            self._carrier.close()
            self._transport.close()
            self._listener.close()
            self._poller.close()

    def _over(self) -> bool:
        return self._leave_at is not None and time.monotonic() >= self._leave_at

    def _pass(self) -> None:
        now = time.monotonic()
        due = min(self._core.next_deadline(now), self._injection.next_deadline(now))
        if self._leave_at is not None:
            due = min(due, self._leave_at)
        self._poller.poll(max(0.0, due - now))
        now = time.monotonic()
        if self._core.urgent or now >= self._core.next_deadline(now):
            self._execute(self._core.handle(ev.Tick(), now))
        if self._rates.due(now):
            self._rates.note(self._transport.stats(), now)
        self._inject()

    def _inject(self) -> None:
        """Suffer the faults that are due; called wherever something may have brought a moment of the plan."""
        if self._injection.armed:
            self._injection.poll(self._core, time.monotonic())

    def _feel(self, event: ev.Event) -> None:
        self._execute(self._core.handle(event, time.monotonic()))

    def _throw(self, error: Exception) -> None:
        """Make the training function's current or next call raise this, and every later one."""
        self._thrown = error
        if self._syncing:
            self._replies.put(error)

    def _carrier_changed(self, level: int, up: bool, why: str) -> None:
        if not up:
            self._feel(ev.OwnNicLost(level, why))

    def _take_requests(self) -> None:
        while self._requests:
            request = self._requests.popleft()
            if callable(request):
                request()
                continue
            self._execute(self._core.handle(request, time.monotonic()))
            if isinstance(request, ev.Ended):
                self._ended = True
                self._leave_if_over()

    def _programs(self, fabric: Fabric, server: int) -> Programs:
        return Programs(Schedules(fabric, self._spec.algorithm, self._spec.constants), server)

    # --- instructions ----------------------------------------------------------------------------

    def _execute(self, instructions: Iterable[ev.Instruction]) -> None:
        for instruction in instructions:
            kind = type(instruction)
            if kind is Send:
                self._send(instruction)  # type: ignore[arg-type]
            elif kind is Reduce:
                assert self._workspace is not None
                self._workspace.reduce(instruction)  # type: ignore[arg-type]
            else:
                self._carry_out(instruction)

    def _send(self, send: Send) -> None:
        peer, level, header, place, priority = send
        if self._injection.armed:
            self._injection.saw(header)
            if header.kind == Kind.TOKEN:
                self._injection.before_token(header.step, self._core, time.monotonic())
        payload = None
        if place is not None and place.buffer == Buffer.STATE:
            payload = self._handover.outgoing(place, header.nbytes)
            if self._injection.armed:
                self._injection.before_state(self._core, time.monotonic())
        elif place is not None:
            assert self._workspace is not None
            payload = self._workspace.view(place, header.stop - header.start)
        self._transport.send(peer, level, header, payload, priority)

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.SendText(peer, level, header, text):
                self._transport.send(peer, level, header, memoryview(text), _TEXT_PRIORITY)
            case ev.Open(_, scratch_elements, _, left) if left:
                assert self._workspace is not None
                self._workspace = self._workspace.resume(left, scratch_elements)
            case ev.Open(_, scratch_elements, follows):
                if follows is None:
                    assert self._contribution is not None
                    vector, op = self._contribution
                else:
                    vector, op = neutral(follows), follows.op
                self._workspace = Workspace(vector, scratch_elements, op, self._memory.empty)
            case ev.Commit(step, epoch, contributors):
                assert self._workspace is not None
                self.commit_at_s.append(time.monotonic())
                self._replies.put(Committed(step, epoch, contributors, self._workspace.result))
                self._workspace = None
            case ev.Prepare():
                self._replies.put(instruction)
            case ev.Keep(step, epoch, contributors):
                assert self._workspace is not None
                self._handover.keep(Committed(step, epoch, contributors, self._workspace.result))
                self._workspace = None
            case ev.Replay(step):
                self.commit_at_s.append(time.monotonic())
                self._replies.put(self._handover.kept(step))
            case ev.Expect(nbytes):
                self._handover.expect(nbytes)
            case ev.StateHere(step, digests):
                self._handover.here(step, digests)
            case ev.Retry(step, epoch):
                self._replies.put(Retried(step, epoch))
            case ev.Stop(error):
                self._stop(error)
            case ev.Installed(view):
                for life in view.joined:
                    self._contacts[life.server] = Contact.decode(life.contact)
                joins = view.life(self.server) is not None
                self._injection.start(time.monotonic(), view.commit if joins else None)
                self._in_force.set()
            case ev.Links(wanted):
                self._transport.set_peers(
                    {(peer, level): self._contacts[peer].nics[level] for peer, level in wanted}
                )
            case ev.Fence():
                self._transport.fence()
            case ev.Resume():
                self._transport.resume()
            case ev.Beat(peer, level):
                self._transport.beat(peer, level, self._contacts[peer].nics[level])
            case ev.Tell(message):
                self._tell(message)
            case ev.Leave():
                self._leave_at = time.monotonic() + _LINGER_S
            case _:
                raise InvariantError(
                    f"server {self.server} ({self._core.waits_for()}): unknown {instruction}"
                )

    def _stop(self, error: BmlError) -> None:
        self._error = error
        self._replies.put(error)
        self._handover.fail(error)
        self._in_force.set()
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        """Once the job has failed and the training function has ended, nothing is left to serve."""
        if self._ended and self._error is not None and self._leave_at is None:
            self._leave_at = time.monotonic() + _LINGER_S

    # --- the transport's handler -----------------------------------------------------------------

    def admit(self, peer: int, level: int, header: Header) -> memoryview | wire.Verdict:
        """See bml.transport.interface.Handler."""
        verdict = self._core.admit(peer, header)
        if isinstance(verdict, Place):
            if verdict.buffer == Buffer.STATE:
                return self._handover.incoming(verdict, header.nbytes)
            assert self._workspace is not None
            return self._workspace.view(verdict, header.stop - header.start)
        if verdict is ev.Verdict.TOKEN:
            return _EMPTY
        if verdict is ev.Verdict.TEXT:
            self._texts[peer, level] = bytearray(header.nbytes)
            return memoryview(self._texts[peer, level])
        return wire.WAIT if verdict is ev.Verdict.WAIT else wire.DROP

    def received(self, peer: int, level: int, header: Header) -> None:
        """See bml.transport.interface.Handler."""
        now = time.monotonic()
        text = ""
        if header.kind in (Kind.DESCRIBE, Kind.HEAD):
            text = self._texts.pop((peer, level)).decode(errors="replace")
        if self._injection.armed:
            self._injection.saw(header)
        self._execute(self._core.received(peer, header, text, now))
        self._inject()

    def heard(self, peer: int, level: int) -> None:
        """See bml.transport.interface.Handler."""
        self._core.heard(peer, level, time.monotonic())

    def lost(self, peer: int, level: int, kind: str, why: str) -> None:
        """See bml.transport.interface.Handler."""
        self._execute(self._core.handle(ev.PeerLost(peer, level, kind, why), time.monotonic()))

    # --- the coordinator -------------------------------------------------------------------------

    def _coordinator_connected(self, channel: control.Channel, hello: Hello) -> None:
        """A coordinator dialled in; a newer connection replaces the older one."""
        if self._channel is not None:
            self._channel.close()
        self._channel = channel
        channel.on_message = self._told
        channel.on_close = lambda end: self._coordinator_lost(channel, end)

    def _coordinator_lost(self, channel: control.Channel, end: control.End) -> None:
        if channel is self._channel:
            self._channel = None
            if self._leave_at is not None:
                self._leave_at = 0.0  # it has heard our last word

    def _told(self, data: bytes) -> None:
        message = msg.decode(data)
        if not isinstance(message, msg.ToServer):
            raise msg.MessageError(f"{type(message).__name__} is not for a server")
        self._execute(self._core.handle(ev.Control(message), time.monotonic()))
        self._inject()

    def _tell(self, message: msg.ToCoordinator) -> None:
        if self._channel is not None:
            self._channel.send(msg.encode(message))
