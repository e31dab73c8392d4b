"""N server cores and a coordinator on a virtual clock, with real arithmetic and injected faults.

Every simulated user sums integer vectors over his share of a fixed global batch, so the right result of
every step is known whatever fails: `Simulation` compares every commit with it, bit for bit, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from bml.protocol import coordinator as coord
from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.engine import Place, Reduce, Send
from bml.protocol.frame import Header, Kind
from bml.protocol.server import ServerCore
from bml.protocol.timeouts import Timeouts
from bml.protocol.workspace import Array, Workspace
from bml.schedule import AnyProgram, plan
from bml.sim.network import Network
from bml.train.batches import assignment
from topology import Fabric
from topology.errors import BmlError, InvariantError

_TICK_S = 0.02


@dataclass
class History:
    """What happened, for checks afterwards: commits per step and server, faults, errors."""

    commits: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    commit_at_s: dict[int, list[float]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    errors: dict[int, BmlError] = field(default_factory=dict)


class _Server:
    """One simulated machine: a core, its memory, its user."""

    def __init__(self, core: ServerCore):
        self.core = core
        self.alive = True
        self.left = False
        self.silent: set[int] = set()
        self.workspace: Workspace | None = None
        self.contribution: Array | None = None
        self.base: tuple[int, ...] = ()
        self.inbox: dict[tuple[int, int], deque[tuple[Header, bytes]]] = {}


class Simulation:
    """`steps` steps of all-reduce over vectors of `n_elements` on `fabric`.

    Faults are asked for with `crash`, `silence` and `crash_coordinator`, at a time or when the first
    server reaches a step. `run` returns the history; it raises InvariantError as soon as two servers
    disagree or a result is wrong, and when the run does not end by `deadline_s` (virtual).
    """

    def __init__(
        self,
        fabric: Fabric,
        seed: int,
        steps: int = 5,
        n_elements: int = 41,
        detect_s: float = 0.5,
        min_servers: int | None = None,
        algorithm: str = "auto",
        restart_s: float = 0.3,
    ):
        self.fabric = fabric
        self.steps = steps
        self.history = History()
        self.network = Network(seed)
        self.finished: coord.Finished | None = None
        self._n_elements = n_elements
        self._timeouts = Timeouts.of(detect_s)
        self._min_servers = min_servers
        self._restart_s = restart_s
        self._algorithm = algorithm
        self._programs: dict[tuple[Fabric, int], AnyProgram] = {}
        self._terms = 0
        self._coordinator: coord.Coordinator | None = None
        self.servers = {server: _Server(self._core(server)) for server in fabric.servers}
        self._start_coordinator()
        for server in fabric.servers:
            self.network.after(self.network.random.uniform(0, _TICK_S), lambda s=server: self._tick(s))  # type: ignore[misc]

    # --- faults ----------------------------------------------------------------------------------

    def crash(self, server: int) -> None:
        """The process of `server` dies now: connections break, its memory is gone."""
        node = self.servers[server]
        if not node.alive:
            return
        self._log(f"crash of server {server}")
        node.alive = False
        for level in range(self.fabric.levels):
            for peer in self.fabric.neighbours(server, level):
                if level not in node.silent and level not in self.servers[peer].silent:
                    lost = ev.PeerLost(server, level, "eof", f"server {server} closed the connection")
                    self.network.deliver((server, peer, level), lambda p=peer, e=lost: self._event(p, e))  # type: ignore[misc]
        gone = coord.Gone(server, "process gone")
        self.network.deliver((server, "control"), lambda: self._coordinate(gone))

    def silence(self, server: int, level: int) -> None:
        """The NIC (server, level) drops everything from now on, both ways, without a sign."""
        self._log(f"NIC {server}/{level} goes silent")
        self.servers[server].silent.add(level)

    def crash_coordinator(self) -> None:
        """The coordinator dies now; a new one starts after `restart_s`."""
        self._log("crash of the coordinator")
        self._coordinator = None
        self.network.after(self._restart_s, self._start_coordinator)

    def run(self, deadline_s: float = 60.0) -> History:
        """Run to the end of the job; see the class."""
        if not self.network.run(lambda: self.finished is not None and self._all_told(), deadline_s):
            waits = [f"server {s}: {node.core.waits_for()}" for s, node in self.servers.items() if node.alive]
            raise InvariantError("the run did not end\n" + "\n".join([*self.history.lines, *waits]))
        return self.history

    def _all_told(self) -> bool:
        return all(
            node.left or not node.alive or server in self.history.errors
            for server, node in self.servers.items()
        )

    # --- the coordinator -------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self._terms += 1
        if self.finished:
            return
        made = coord.Coordinator(
            self.fabric, self._terms, self._timeouts, self._min_servers, self.network.now
        )
        self._coordinator = made
        for server, node in self.servers.items():
            event = coord.Connected(server) if node.alive else coord.Gone(server, "process gone")
            self.network.deliver((server, "control"), lambda e=event: self._coordinate(e, made))  # type: ignore[misc]
        self._tick_coordinator(made)

    def _tick_coordinator(self, made: coord.Coordinator) -> None:
        if made is self._coordinator and not self.finished:
            self._coordinate(coord.Tick())
            self.network.after(_TICK_S, lambda: self._tick_coordinator(made))

    def _coordinate(self, event: coord.Event, only: coord.Coordinator | None = None) -> None:
        made = self._coordinator
        if made is None or (only is not None and only is not made):
            return
        for instruction in made.handle(event, self.network.now):
            if isinstance(instruction, coord.Finished):
                self._log(f"finished: {instruction.abort or 'done'}")
                self.finished = instruction
            else:
                self._post(instruction)

    def _post(self, post: coord.Post) -> None:
        if not isinstance(post.message, msg.Who):
            self._log(f"coordinator -> {post.server}: {post.message}")
        event = ev.Control(post.message)
        self.network.deliver((post.server, "from-coordinator"), lambda: self._event(post.server, event))

    # --- a server --------------------------------------------------------------------------------

    def _core(self, server: int) -> ServerCore:
        return ServerCore(server, self.fabric, self._program, self._timeouts, 64, 0.0)

    def _program(self, fabric: Fabric, server: int) -> AnyProgram:
        if (fabric, server) not in self._programs:
            self._programs[fabric, server] = plan(fabric, self._algorithm, or_auto=True).program(server)
        return self._programs[fabric, server]

    def _tick(self, server: int) -> None:
        if self.servers[server].alive and not self.servers[server].left:
            self._event(server, ev.Tick())
            self.network.after(_TICK_S, lambda: self._tick(server))

    def _event(self, server: int, event: ev.Event) -> None:
        node = self.servers[server]
        if not node.alive or node.left:
            return
        self._execute(server, node.core.handle(event, self.network.now))
        if not isinstance(event, ev.Tick):
            self._execute(server, node.core.handle(ev.Tick(), self.network.now))

    def _execute(self, server: int, instructions: Iterable[ev.Instruction]) -> None:
        for instruction in instructions:
            if self.servers[server].alive:
                self._carry_out(server, self.servers[server], instruction)

    def _carry_out(self, server: int, node: _Server, instruction: ev.Instruction) -> None:
        core = node.core
        match instruction:
            case Reduce():
                assert node.workspace is not None
                node.workspace.reduce(instruction)
            case Send(peer, level, header, place, _):
                payload = b""
                if place is not None:
                    assert node.workspace is not None
                    payload = bytes(node.workspace.view(place, header.stop - header.start))
                self._transmit(server, peer, level, header, payload)
            case ev.SendText(peer, level, header, text):
                self._transmit(server, peer, level, header, text)
            case ev.Open(_, scratch_elements):
                assert node.contribution is not None
                node.workspace = Workspace(node.contribution, scratch_elements, "sum")
            case ev.Beat(peer, level):
                self._beat(server, peer, level)
            case ev.Tell(message):
                event = coord.From(server, message)
                if not isinstance(message, msg.Progress | msg.Status):
                    self._log(f"{server} -> coordinator: {message}")
                self.network.deliver((server, "control"), lambda: self._coordinate(event))
            case ev.Installed(view):
                self._log(f"server {server} installs view {view.epoch}, commit {view.commit}")
                if len(core.views) == 1:
                    node.base = view.members
                    self._prepare(server, 1)
            case ev.Retry(step, _):
                self._prepare(server, step)
            case ev.Commit(step, _, contributors):
                self._committed(server, node, step, contributors)
            case ev.Stop(error):
                self.history.errors[server] = error
            case ev.Resume():
                for peer, level in list(node.inbox):
                    self.network.after(0, lambda p=peer, lv=level: self._drain(server, p, lv))  # type: ignore[misc]
            case ev.Leave():
                node.left = True
            case ev.Fence() | ev.Links():
                pass  # older epochs are dropped where they arrive; there is a wire between any two NICs

    # --- the wires -------------------------------------------------------------------------------

    def _blocked(self, a: int, b: int, level: int) -> bool:
        return level in self.servers[a].silent or level in self.servers[b].silent

    def _transmit(self, server: int, peer: int, level: int, header: Header, payload: bytes) -> None:
        def arrive() -> None:
            node = self.servers[peer]
            if node.alive and not self._blocked(server, peer, level):
                node.core.heard(server, level, self.network.now)
                node.inbox.setdefault((server, level), deque()).append((header, payload))
                self._drain(peer, server, level)

        self.network.deliver((server, peer, level), arrive)

    def _beat(self, server: int, peer: int, level: int) -> None:
        def arrive() -> None:
            node = self.servers[peer]
            if node.alive and not self._blocked(server, peer, level):
                node.core.heard(server, level, self.network.now)

        self.network.deliver((server, peer, level, "beat"), arrive)

    def _drain(self, server: int, peer: int, level: int) -> None:
        """Take frames off a connection until one must wait."""
        node = self.servers[server]
        inbox = node.inbox.get((peer, level), deque())
        while inbox and node.alive:
            header, payload = inbox[0]
            verdict = node.core.admit(peer, header)
            if verdict is ev.Verdict.WAIT:
                return
            inbox.popleft()
            if verdict is ev.Verdict.DROP:
                continue
            if isinstance(verdict, Place):
                assert node.workspace is not None
                node.workspace.view(verdict, header.stop - header.start)[:] = payload
            text = payload.decode() if header.kind == Kind.DESCRIBE else ""
            self._execute(server, node.core.received(peer, header, text, self.network.now))

    # --- the user --------------------------------------------------------------------------------

    def _samples(self, step: int) -> Array:
        """What each sample contributes to a step: integers, exact in float64 in any order."""
        rows = np.arange(4 * self.fabric.n_servers)[:, None]
        return ((rows * 7 + np.arange(self._n_elements) * 3 + step) % 101).astype(np.float64)

    def _prepare(self, server: int, step: int) -> None:
        """The user's thread: compute this server's part for the view of now, some time later submit it."""
        node = self.servers[server]
        view = node.core.view
        assert view is not None
        samples = self._samples(step)
        own, extra = assignment(np.arange(len(samples)), node.base, view.members)[server]
        total = samples[np.concatenate([own, extra])].sum(axis=0)

        def submit() -> None:
            node.contribution = total
            submit_event = ev.Submit(step, view.epoch, len(total), total.itemsize, 7, "allreduce sum")
            self._event(server, submit_event)

        self.network.after(self.network.random.uniform(0, 0.01), submit)

    def _committed(self, server: int, node: _Server, step: int, contributors: tuple[int, ...]) -> None:
        assert node.workspace is not None
        self._log(f"server {server} commits step {step}")
        if not np.array_equal(node.workspace.result, self._samples(step).sum(axis=0)):
            raise InvariantError(
                "\n".join([*self.history.lines, f"server {server}: wrong result in step {step}"])
            )
        commits = self.history.commits.setdefault(step, {})
        if server in commits or any(other != contributors for other in commits.values()):
            raise InvariantError(
                "\n".join([*self.history.lines, f"step {step}: {commits}, {server}: {contributors}"])
            )
        commits[server] = contributors
        self.history.commit_at_s.setdefault(step, []).append(self.network.now)
        node.base = contributors
        if step == self.steps:
            self._event(server, ev.Ended("done"))
        else:
            self._prepare(server, step + 1)

    def _log(self, line: str) -> None:
        self.history.lines.append(f"{self.network.now * 1000:9.2f} ms  {line}")
