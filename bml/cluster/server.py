"""The server's shell: one thread that owns sockets and memory and carries out what the core says.

The training function runs in another thread (or the process's main one) and meets this thread in `sync`
alone: it brings a contribution and gets a result, or is told to prepare it again for a new view.
"""

from __future__ import annotations

import logging
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
from bml.cluster.direct import DirectSync, Replies, Shell
from bml.cluster.fleet import Request
from bml.cluster.following import Follower
from bml.cluster.handover import Handover
from bml.cluster.injection import Hands, Injection
from bml.cluster.job import Contact, Contacts, JobSpec, check_contacts
from bml.cluster.rates import Rates
from bml.cluster.trace import ServerTrace, Trace, TracedWorkspace
from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.call import Call, neutral
from bml.protocol.direct import Post, Stage, Sum
from bml.protocol.engine import Buffer, Place, Reduce, Send
from bml.protocol.frame import Header, Kind
from bml.protocol.plausible import check_for_server
from bml.protocol.reuse import StepMemory
from bml.protocol.server import ServerCore
from bml.protocol.slices import LAN_RATE, rate_of, slice_nbytes
from bml.protocol.spans import Spans, size
from bml.protocol.transfer import Rope
from bml.protocol.workspace import Array, Workspace
from bml.schedule import AnyPrograms, DirectProgram, OneProgram, Programs, Schedules
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

_LOG = logging.getLogger("bml.cluster")

_TEXT_PRIORITY = -2
_EMPTY = memoryview(bytearray())
_NO_RESULT: Array = np.empty(0, np.uint8)
_COUNTERS = ("nbytes_sent", "nbytes_received", "nbytes_copied_sent", "nbytes_copied_received")
#: How long after `Leave` the loop still delivers what it has said, in seconds.
_LINGER_S = 0.2
#: Of how many steps, the last ones, the times are kept for the report: a job may run for months.
_COMMITS_KEPT = 100_000
#: Larger fabrics plan when it is needed: planning all single failures ahead would delay the start.
_MOST_PREPARED = 64


class Server:
    """One server of a job on this machine. `contact` is known at once; `start` needs everybody's.

    `nics` are this server's own addresses, one per level. `life` numbers those of a server that joins a
    running job, None: it is one of those with which the job begins. `strike` does a fault to real cables and
    returns when it is done; None where there are none.
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
        few = self.fabric.n_servers <= _MOST_PREPARED and spec.transport != "shm"
        if few and spec.algorithm in ("auto", "packed"):
            prepare(self.fabric)
        self._spec = spec
        self._rate = spec.nic_rate or LAN_RATE
        self._poller = Poller(on_wake=self._take_requests)
        self._trace = Trace(server, self) if spec.trace else None
        self._opened = open_transport(
            spec.transport,
            server,
            nics,
            token=spec.token,
            job=spec.job,
            poller=self._poller,
            handler=self._trace or self,
            connect_s=spec.timeouts().connect_s,
            life=life or 0,
            traffic_class=spec.traffic_class,
        )
        self._transport, self._memory = self._opened.transport, self._opened.memory
        self._step_memory = StepMemory(self._memory.empty)
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
        self._replies: Replies = queue.SimpleQueue()
        self._boards: Boards | None = None
        if isinstance(self._memory, SharedPool):
            self._boards = Boards(server, spec.token, spec.job)
        self.contact = Contact(
            server,
            self._listener.endpoint,
            self._transport.endpoints,
            self._opened.name,
            None if self._boards is None else self._boards.own.address,
        )
        joins = None if life is None else msg.Life(server, life, self.contact.encode())
        self._core = ServerCore(
            server, self.fabric, self._programs, spec.timeouts(), self._slice_nbytes, time.monotonic(), joins
        )
        self._handover = Handover(life is not None)
        self._direct: DirectSync | None = None
        self._follower: Follower | None = None
        if isinstance(self._memory, SharedPool) and self._boards is not None:
            self._share_memory(self._memory, self._boards)
        self._contacts: dict[int, Contact] = {}
        self._lives: dict[int, int] = {}
        self._channel: control.Channel | None = None
        hands = Hands(self._transport, self._poller, self._tell, self._throw, self._feel, self.leave, strike)
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
        self._heard: dict[wire.LinkKey, float] = {}
        self._tick_at = time.monotonic()
        self._error: BmlError | None = None
        self._in_force = threading.Event()
        self._left = threading.Event()
        self._leave_at: float | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"bml-server-{server}", daemon=True)
        self.steps = 0
        self.commit_at_s: deque[float] = deque(maxlen=_COMMITS_KEPT)

    # --- for the training thread -----------------------------------------------------------------

    def start(self, contacts: Contacts) -> None:
        """Start the loop; the coordinator may call from now on."""
        others = {server: contact.transport for server, contact in contacts.items()}
        if set(others.values()) != {self._opened.name}:
            raise FabricError(f"servers fell back to different transports: {others}; ask for tcp everywhere")
        self._contacts = dict(contacts)
        if self._spec.nic_rate is None:
            self._rate = rate_of(host for contact in contacts.values() for host, _ in contact.nics)
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
        call = Call(op, contribution.dtype.str, contribution.size, text)
        submit = ev.Submit(self._handover.step, epoch, call, signature)
        if self._direct is not None:
            reply = self._direct.sync(submit, contribution, op, shared)
        else:
            self._plan(contribution.nbytes)
            self._request(submit)
            reply = self._answer()
        self._syncing = False
        if isinstance(reply, ev.Replay):
            reply = self._handover.kept(reply.step)
        if isinstance(reply, Committed):
            self._handover.step = reply.step + 1
        return reply

    def _request(self, event: ev.Event) -> None:
        self._requests.append(event)
        self._poller.wake()

    def _answer(self) -> Outcome | ev.Replay:
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
                "kept": size(record.view.final),
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

    def trace(self) -> ServerTrace | None:
        """What it did when, if that was to be recorded; to be asked after `end`."""
        return None if self._trace is None else self._trace.taken()

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
            if self._channel is not None:
                self._channel.close()
            self._transport.close()
            self._listener.close()
            self._poller.close()
            if self._boards is not None:
                assert self._follower is not None
                self._follower.close()
                self._boards.close()
                self._reduction.close()

    def _over(self) -> bool:
        return self._leave_at is not None and time.monotonic() >= self._leave_at

    def _pass(self) -> None:
        now = time.monotonic()
        due = self._tick_at
        if self._injection.armed:
            due = min(due, self._injection.next_deadline(now))
        if self._leave_at is not None:
            due = min(due, self._leave_at)
        self._poller.poll(max(0.0, due - now))
        with self._guard:
            now = time.monotonic()
            if now >= self._tick_at or self._core.urgent:
                self._tick(now)
            self._inject()

    def _tick(self, now: float) -> None:
        for (peer, level), heard_at in self._heard.items():
            self._core.heard(peer, level, heard_at)
        self._heard.clear()
        self._execute(self._core.handle(ev.Tick(), now))
        # Whatever happens until then, nothing is due before: a tick sends the heartbeats that are due, and
        # no silence can become suspect between two heartbeats that could not be suspect now.
        self._tick_at = self._core.next_deadline(now)
        if self._rates.due(now):
            self._rates.note(self._transport.stats(), now)

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

    def _cannot_follow(self, error: BmlError) -> None:
        """The training function of a joiner is not to wait for what will not come; any thread may say so."""
        self._throw(error)
        self._handover.fail(error)

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

    def _share_memory(self, pool: SharedPool, boards: Boards) -> None:
        self._reduction = Reduction(boards, pool)
        shell = Shell(
            self._core,
            self._guard,
            self._replies,
            self._execute_beside,
            armed=lambda: self._injection.armed,
            stopped=lambda: self._error is not None or self._left.is_set(),
            suffer=self._suffer,
        )
        give_up_s = self._spec.timeouts().orphan_s
        self._direct = DirectSync(boards, self._reduction, shell, give_up_s)
        self._follower = Follower(self._direct, self._handover.keep, self._cannot_follow)

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

    def _programs(self, fabric: Fabric, server: int) -> AnyPrograms:
        if self._direct is not None:
            return OneProgram(DirectProgram(server, fabric.servers))
        return Programs(Schedules(fabric, self._spec.algorithm, self._spec.constants), server)

    def _slice_nbytes(self, nbytes: int) -> int:
        return slice_nbytes(nbytes, self._rate)

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
        if place is not None and place.buffer == Buffer.STATE:
            payload = self._handover.outgoing(place, header.nbytes)
        elif place is not None:
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
                if header.kind == Kind.HEAD and self._injection.armed:
                    self._injection.before_state(self._core, time.monotonic())
                self._transport.send(peer, level, header, memoryview(text), _TEXT_PRIORITY)
            case ev.Open() if self._direct is not None:
                pass  # who said Submit, or Follow, has brought it to the others
            case ev.Called(submit):
                assert self._follower is not None
                self._follower.called(submit)
            case ev.Open(step, scratch_elements, follows, left):
                self._open(step, scratch_elements, follows, left)
            case ev.Commit(step, epoch, contributors) if self._direct is not None:
                self._count_step()
                self._replies.put(Committed(step, epoch, contributors, _NO_RESULT))  # it knows where it lies
            case ev.Commit(step, epoch, contributors):
                self._count_step()
                committed = self._committed(step, epoch, contributors)
                # Before the training thread is woken: it may bring the next contribution at once.
                self._contribution = None
                self._replies.put(committed)
            case ev.Prepare():
                self._replies.put(instruction)
            case ev.Keep(step, epoch, contributors) if self._direct is not None:
                self._direct.keep(Committed(step, epoch, contributors, _NO_RESULT))
            case ev.Keep(step, epoch, contributors):
                self._handover.keep(self._committed(step, epoch, contributors))
            case ev.Replay():
                self._count_step()
                self._replies.put(instruction)
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
                self._lives = {life.server: life.number for life in view.joined}
                if self._boards is not None:
                    self._boards.admit({server: self._contacts[server].board for server in view.members})
                joins = view.life(self.server) is not None
                self._injection.start(time.monotonic(), view.commit if joins else None)
                self._in_force.set()
            case ev.Links(wanted):
                self._transport.set_peers(
                    {(peer, level): self._contacts[peer].nics[level] for peer, level in wanted}, self._lives
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

    def _open(self, step: int, scratch_elements: int, follows: Call | None, left: Spans) -> None:
        if self._trace is not None:
            self._trace.opened(step)
        if left:
            assert self._workspace is not None
            self._workspace = self._workspace.resume(left, scratch_elements)
            return
        if follows is not None:
            vector, op = neutral(follows), follows.op
        else:
            assert self._contribution is not None
            vector, op = self._contribution
        if self._trace is None:
            self._workspace = Workspace(vector, scratch_elements, op, self._step_memory.empty)
            return
        self._workspace = traced = TracedWorkspace(vector, scratch_elements, op, self._step_memory.empty)
        traced.trace = self._trace

    def _committed(self, step: int, epoch: int, contributors: tuple[int, ...]) -> Committed:
        """The result of the step that has ended."""
        assert self._workspace is not None
        result, self._workspace = self._workspace.result, None
        if self._trace is not None:
            self._trace.ended("committed")
        return Committed(step, epoch, contributors, result)

    def _count_step(self) -> None:
        """A result goes to the training function."""
        self.steps += 1
        self.commit_at_s.append(time.monotonic())

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
        text = ""
        if header.kind in (Kind.DESCRIBE, Kind.HEAD):
            text = self._texts.pop((peer, level)).decode(errors="replace")
        armed = self._injection.armed
        if armed:
            self._injection.saw(header)
        self._execute(self._core.received(peer, header, text, time.monotonic()))
        if armed:
            self._inject()

    def heard(self, peer: int, level: int) -> None:
        """See bml.transport.interface.Handler."""
        self._heard[peer, level] = time.monotonic()  # the core asks for it at its next tick

    def lost(self, peer: int, level: int, kind: str, why: str) -> None:
        """See bml.transport.interface.Handler."""
        self._execute(self._core.handle(ev.PeerLost(peer, level, kind, why), time.monotonic()))

    # --- the coordinator -------------------------------------------------------------------------

    def _coordinator_connected(self, channel: control.Channel, hello: Hello) -> None:
        """A coordinator dialled in; a newer connection replaces the older one."""
        if hello.server != control.COORDINATOR:
            _LOG.warning("server %d: closed a control connection of server %d", self.server, hello.server)
            channel.close()
            return
        if self._channel is not None:
            self._channel.close()
        self._channel = channel
        channel.on_message = lambda data: self._told(channel, data)
        channel.on_close = lambda end: self._coordinator_lost(channel)

    def _coordinator_lost(self, channel: control.Channel) -> None:
        if channel is self._channel:
            self._channel = None
            if self._leave_at is not None:
                self._leave_at = 0.0  # it has heard our last word

    def _told(self, channel: control.Channel, data: bytes) -> None:
        try:
            message = check_for_server(msg.decode(data), self.fabric)
            if isinstance(message, msg.Propose):
                check_contacts(message.view.joined, self.fabric.levels)
        except msg.MessageError as error:
            _LOG.warning("server %d: closed the connection of its coordinator: %s", self.server, error)
            channel.close()
            self._coordinator_lost(channel)
            return
        self._execute(self._core.handle(ev.Control(message), time.monotonic()))
        self._inject()

    def _tell(self, message: msg.ToCoordinator) -> None:
        if self._channel is not None:
            self._channel.send(msg.encode(message))
