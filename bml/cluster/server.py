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

import numpy as np
import numpy.typing as npt

from bml.cluster.carrier import CarrierWatch
from bml.cluster.direct import DirectSync, Shell
from bml.cluster.fleet import Request
from bml.cluster.injection import Hands, Injection
from bml.cluster.job import Contact, Contacts, JobSpec
from bml.cluster.rates import Rates
from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.direct import Post, Stage, Sum
from bml.protocol.engine import Place, Reduce, Send
from bml.protocol.frame import Header, Kind
from bml.protocol.server import ServerCore
from bml.protocol.workspace import Array, Workspace
from bml.schedule import AnyProgram, DirectProgram, plan
from bml.schedule.packed import prepare
from bml.train.communicator import Committed, Outcome, Retried
from bml.transport import control
from bml.transport import interface as wire
from bml.transport.auth import Hello
from bml.transport.choice import open_transport
from bml.transport.poller import Poller
from bml.transport.shm import Boards, Reduction, SharedPool
from faults import Fault
from topology import Fabric
from topology.errors import BmlError, FabricError, InvariantError

_TEXT_PRIORITY = -2
_EMPTY = memoryview(bytearray())
_NO_RESULT: Array = np.empty(0, np.uint8)
_SLICE_NBYTES = 256 << 10
#: How long after `Leave` the loop still delivers what it has said, in seconds.
_LINGER_S = 0.2
#: Larger fabrics plan when it is needed: planning all single failures ahead would delay the start.
_MOST_PREPARED = 64


class Server:
    """One server of a job on this machine. `contact` is known at once; `start` needs everybody's.

    `nics` are this server's own addresses, one per level. `strike` does a fault to real cables and returns
    when it is done; None where there are none.
    """

    def __init__(
        self,
        spec: JobSpec,
        server: int,
        nics: Sequence[str],
        control_host: str = "127.0.0.1",
        strike: Callable[[Fault], None] | None = None,
    ):
        self.server = server
        self.fabric = spec.parsed_fabric()
        # Recovery waits for the plan: have those of single failures at hand.
        few = self.fabric.n_servers <= _MOST_PREPARED and spec.transport != "shm"
        self._prepared = few and spec.algorithm in ("auto", "packed") and prepare(self.fabric) > 0
        self._spec = spec
        self._poller = Poller(on_wake=self._take_requests)
        self._core = ServerCore(
            server, self.fabric, self._program, spec.timeouts(), _SLICE_NBYTES, time.monotonic()
        )
        self._transport, self._transport_name, self._memory = open_transport(
            spec.transport,
            server,
            nics,
            token=spec.token,
            job=spec.job,
            poller=self._poller,
            handler=self,
            connect_s=spec.timeouts().connect_s,
        )
        self._listener = control.ControlListener(
            control_host,
            token=spec.token,
            job=spec.job,
            poller=self._poller,
            on_connect=self._coordinator_connected,
            server=server,
        )
        #: One thread at a time uses the core and what it stands on: the loop's, or in `sync` the user's.
        self._guard = threading.Lock()
        self._poller.guard = self._guard
        self._replies: queue.SimpleQueue[Outcome | Exception] = queue.SimpleQueue()
        self._boards: Boards | None = None
        self._direct: DirectSync | None = None
        if isinstance(self._memory, SharedPool):
            self._share_memory(self._memory)
        self.contact = Contact(
            server,
            self._listener.endpoint,
            self._transport.endpoints,
            self._transport_name,
            None if self._boards is None else self._boards.own.address,
        )
        self._contacts: Contacts = {}
        self._channel: control.Channel | None = None
        hands = Hands(self._transport, self._poller, self._tell, self._throw, self._feel, strike)
        self._injection = Injection(server, spec.fault_plan(), self.fabric, hands)
        self._carrier = CarrierWatch(server, nics, self._poller, self._carrier_changed)
        self._rates = Rates(self.fabric.levels, time.monotonic())
        self._nics = tuple(nics)
        self._requests: deque[ev.Event | Callable[[], None]] = deque()
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
        if set(others.values()) != {self._transport_name}:
            raise FabricError(f"servers fell back to different transports: {others}; ask for tcp everywhere")
        self._contacts = contacts
        if self._boards is not None:
            self._boards.open({server: contact.board for server, contact in contacts.items()})
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
        """All servers of the job's fabric, lost ones too."""
        return self.fabric.servers

    @property
    def step(self) -> int:
        """Number of the next step, or the one that is being synchronised; the first is 1."""
        return self._core.step

    def sync(
        self, epoch: int, contribution: Array, op: str, text: str, signature: int, shared: bool = False
    ) -> Outcome:
        """Bring this server's contribution to the next step, prepared for view `epoch`.

        `contribution` is one-dimensional and contiguous, and is only read. Returns the result once the
        step is committed by everybody, or says for which view to prepare it again; `shared` allows that it
        lies in memory that other servers read too. Raises the error that ends the job.
        """
        if self._error:
            raise self._error
        self._syncing = True
        if self._thrown:
            raise self._thrown
        self._contribution = (contribution, op)
        step = self._core.step
        submit = ev.Submit(step, epoch, contribution.size, contribution.itemsize, signature, text)
        if self._direct is not None:
            reply: Outcome | Exception = self._direct.sync(submit, contribution, op, shared)
        else:
            self._requests.append(submit)
            self._poller.wake()
            reply = self._replies.get()
        if isinstance(reply, Exception):
            raise reply
        self._syncing = False
        return reply

    def end(self, outcome: str, error: str = "") -> None:
        """Say that the training function ended, then serve the others until all are done."""
        self._requests.append(ev.Ended(outcome, error))
        self._poller.wake()
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

    @property
    def nbytes_copied(self) -> int:
        """Contributions that lay outside of shared memory and were copied into it, in bytes."""
        return self._reduction.nbytes_copied if self._direct is not None else 0

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
        traffic = self._rates.traffic(self._transport.stats(), now)
        return {
            "process": os.getpid(),
            "epoch": self._core.epoch,
            "step": self._core.step,
            "phase": self._injection.phase(self._core),
            "progress": self._core.progress,
            "waits_for": (self._direct.waits_for() if self._direct else "") or self._core.waits_for(),
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
            if self._boards is not None:
                self._boards.close()
                self._reduction.close()

    def _over(self) -> bool:
        return self._leave_at is not None and time.monotonic() >= self._leave_at

    def _pass(self) -> None:
        now = time.monotonic()
        due = min(self._core.next_deadline(now), self._injection.next_deadline(now))
        if self._leave_at is not None:
            due = min(due, self._leave_at)
        self._poller.poll(max(0.0, due - now))
        with self._guard:
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

    def _share_memory(self, pool: SharedPool) -> None:
        self._boards = Boards(self.server, self._spec.token, self._spec.job)
        self._reduction = Reduction(self._boards, pool)
        shell = Shell(
            self._core,
            self._guard,
            self._replies,
            self._execute_beside,
            armed=lambda: self._injection.armed,
            suffer=self._suffer,
        )
        give_up_s = self._spec.timeouts().orphan_s
        self._direct = DirectSync(self._boards, self._reduction, shell, give_up_s)

    def _execute_beside(self, instructions: Iterable[ev.Instruction]) -> None:
        """Carry out instructions in the user's thread; what they queued must not wait for the loop's."""
        self._execute(instructions)
        if self._poller.has_more:
            self._poller.wake()

    def _suffer(self, header: Header | None) -> None:
        with self._guard:
            if header is not None:
                self._injection.saw(header)
            self._inject()

    def _program(self, fabric: Fabric, server: int) -> AnyProgram:
        if self._direct is not None:
            return DirectProgram(server, fabric.servers)
        algorithm = self._spec.algorithm
        if algorithm == "auto" and fabric.failures and not (self._prepared and len(fabric.failures) == 1):
            # Packing trees may take a second for several failures, in which this thread would be deaf and
            # mute and its server be taken for dead; detours are found in milliseconds.
            algorithm = "detour"
        return plan(fabric, algorithm, or_auto=True).program(server)

    # --- instructions ----------------------------------------------------------------------------

    def _execute(self, instructions: Iterable[ev.Instruction]) -> None:
        for instruction in instructions:
            kind = type(instruction)
            if kind is Send:
                self._send(instruction)  # type: ignore[arg-type]
            elif kind is Reduce:
                assert self._workspace is not None
                self._workspace.reduce(instruction)  # type: ignore[arg-type]
            elif kind is Post or kind is Sum:
                self._go_direct(instruction)  # type: ignore[arg-type]
            else:
                self._carry_out(instruction)

    def _send(self, send: Send) -> None:
        peer, level, header, place, priority = send
        if self._injection.armed:
            self._injection.saw(header)
            if header.kind == Kind.TOKEN:
                self._injection.before_token(header.step, self._core, time.monotonic())
        payload = None
        if place is not None:
            assert self._workspace is not None
            payload = self._workspace.view(place, header.stop - header.start)
        self._transport.send(peer, level, header, payload, priority)

    def _go_direct(self, instruction: Post | Sum) -> None:
        assert self._direct is not None
        if isinstance(instruction, Sum):
            self._direct.add(instruction)
            return
        if instruction.stage is Stage.COMPLETE and self._injection.armed:
            self._injection.before_token(instruction.step, self._core, time.monotonic())
        self._direct.post(instruction)

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.SendText(peer, level, header, text):
                self._transport.send(peer, level, header, memoryview(text), _TEXT_PRIORITY)
            case ev.Open() if self._direct is not None:
                pass  # the training thread has brought it to the others
            case ev.Open(_, scratch_elements):
                assert self._contribution is not None
                vector, op = self._contribution
                self._workspace = Workspace(vector, scratch_elements, op, self._memory.empty)
            case ev.Commit(step, epoch, contributors) if self._direct is not None:
                self.commit_at_s.append(time.monotonic())
                self._replies.put(Committed(step, epoch, contributors, _NO_RESULT))  # it knows where it lies
            case ev.Commit(step, epoch, contributors):
                assert self._workspace is not None
                self.commit_at_s.append(time.monotonic())
                self._replies.put(Committed(step, epoch, contributors, self._workspace.result))
                self._workspace = None
            case ev.Retry(step, epoch):
                self._replies.put(Retried(step, epoch))
            case ev.Stop(error):
                self._stop(error)
            case ev.Installed():
                self._injection.start(time.monotonic())
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
        if header.kind == Kind.DESCRIBE:
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
