"""One simulated server: the shell round a real core, with real memory, real arithmetic and a user."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from bml.protocol import events as ev
from bml.protocol import messages as msg
from bml.protocol.call import Call, neutral
from bml.protocol.dataflow import Buffer, Place, Reduce, Send
from bml.protocol.direct import Post, Stage, Sum
from bml.protocol.frame import Header, Kind
from bml.protocol.messages import View
from bml.protocol.server import ServerCore
from bml.protocol.timeouts import Timeouts
from bml.protocol.transfer import Part, cut, verify
from bml.protocol.workspace import Array, Workspace
from bml.schedule import AnyPrograms, DirectProgram, OneProgram, Programs, Schedules
from bml.schedule.model import Constants
from bml.sim.headquarters import Channel
from bml.sim.history import History
from bml.sim.network import Network
from bml.sim.process import Process
from bml.sim.promises import PromiseBroken, Promises
from bml.sim.sharing import Host, Sharing
from bml.sim.wires import Parcel, Wires
from bml.train.batches import BatchPlan, assignment, used_indices
from bml.train.ledger import Ledger
from topology import Fabric
from topology.errors import BmlError

_SIGNATURE = 7
_LINGER_S = 0.2
_GRAIN_NBYTES = 8


class _State(msgspec.Struct):
    """What a joiner needs: the sum of all results, the contributors of the last step, the ledger."""

    params: bytes
    base: tuple[int, ...]
    ledger: bytes


class _Kept(NamedTuple):
    """The result of a step that a learner followed."""

    epoch: int
    contributors: tuple[int, ...]
    view: View
    result: Array


class World(Protocol):
    """What a machine needs of the simulation."""

    fabric: Fabric
    first: tuple[int, ...]
    steps: int
    n_elements: int
    slice_nbytes: int
    algorithm: str
    constants: Constants
    timeouts: Timeouts
    network: Network
    wires: Wires
    host: Host | None
    history: History
    promises: Promises

    def point(self, name: str, text: str, server: int | None = None) -> None:
        """Something happened (at a server) to which a mishap may be tied."""

    def tell(self, server: int, message: msg.ToCoordinator) -> None:
        """Send a message to the coordinator."""


@lru_cache(maxsize=1 << 14)
def _programs(fabric: Fabric, algorithm: str, constants: Constants, server: int) -> Programs:
    return Programs(_schedules(fabric, algorithm, constants), server)


@lru_cache(maxsize=512)
def _schedules(fabric: Fabric, algorithm: str, constants: Constants) -> Schedules:
    return Schedules(fabric, algorithm, constants)


@lru_cache(maxsize=256)
def samples(n_samples: int, n_elements: int, step: int) -> Array:
    """What each sample contributes to a step, float64 (n_samples, n_elements).

    The first half of the elements are integers, exact in any order; the others are not, so that another
    order of addition shows in their last bits.
    """
    rows = np.arange(n_samples)[:, None]
    table = ((rows * 7 + np.arange(n_elements) * 3 + step * 5) % 101).astype(np.float64)
    table[:, n_elements - n_elements // 2 :] *= 0.1
    table.setflags(write=False)
    return table


class Machine:
    """See the module's text."""

    def __init__(self, server: int, world: World, life: msg.Life | None = None):
        self.server = server
        self.life = life
        self.first_step = 1
        self.process = Process()
        self.channel: Channel | None = None
        self.over = False
        self.done = False
        self._world = world
        self.core = ServerCore(
            server,
            world.fabric,
            self._planner,
            world.timeouts,
            lambda nbytes: world.slice_nbytes,
            world.network.now,
            life,
        )
        self._workspace: Workspace | None = None
        self._contribution: Array | None = None
        self._kept: Array | None = None
        # Not the members of the first view: servers may install different ones first.
        self._base: tuple[int, ...] = world.first
        self._params = np.zeros(world.n_elements)
        self._keeps: dict[int, _Kept] = {}
        self._gift = bytearray()  # what a donor sends, or a learner receives
        self._given = 0
        self._leaving = False
        self._entered: tuple[int, int] | None = None
        per_step = 2 * world.fabric.n_servers + 1
        self._batches = BatchPlan(per_step * world.steps, per_step, 1, seed=1)
        self.ledger = Ledger(self._batches.n_samples)
        self._step_view: View | None = None
        self._wake_at = float("inf")
        self._sharing: Sharing | None = None
        if world.host is not None:
            self._sharing = Sharing(server, world.host, world.network, self.process, self.handle)

    def start(self) -> None:
        """The process starts to run."""
        self._wake(self._world.network.now + self._world.network.random.uniform(0, 0.02))

    def leave(self) -> None:
        """The user is told that his server must go: he stops before the next step."""
        self._leaving = True

    def waits_for(self) -> str:
        """What it waits for, in words."""
        if not self.process.runs:
            return "frozen" if self.process.alive else "dead"
        return self.core.waits_for()

    # --- events ----------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """Let the core react, carry out what it says."""
        self._carry_out_all(self.core.handle(event, self._world.network.now))

    def told(self, message: msg.ToServer) -> None:
        """See `Reachable`."""
        self.handle(ev.Control(message))

    def arrived(self, peer: int, level: int) -> None:
        """Something may be taken off a connection, until a frame must wait."""
        wires = self._world.wires
        while self.process.runs:
            parcel = wires.peek(self.server, peer, level)
            if parcel is None:
                return
            self.core.heard(peer, level, self._world.network.now)
            verdict = self.core.admit(peer, parcel.header)
            if verdict is ev.Verdict.WAIT:
                break
            wires.take(self.server, peer, level)
            if verdict is not ev.Verdict.DROP:
                self._take(peer, parcel, verdict)
        self._tick_if_urgent()

    def lost(self, peer: int, level: int, why: str) -> None:
        """A connection broke."""
        self.handle(ev.PeerLost(peer, level, why, f"connection to server {peer} on level {level}: {why}"))

    def heard(self, peer: int, level: int) -> None:
        """A heartbeat came in."""
        self.core.heard(peer, level, self._world.network.now)

    def _take(self, peer: int, parcel: Parcel, verdict: Place | ev.Verdict) -> None:
        header = parcel.header
        text = ""
        if header.kind in (Kind.DESCRIBE, Kind.HEAD):
            text = parcel.payload.decode()
        else:
            self._world.promises.admitted(self.server, peer, parcel.view, self.core.view)
        if isinstance(verdict, Place) and verdict.buffer == Buffer.STATE:
            self._gift[verdict.offset : verdict.offset + header.nbytes] = parcel.payload
        elif isinstance(verdict, Place):
            assert self._workspace is not None
            self._workspace.view(verdict, header.stop - header.start)[:] = parcel.payload
        self._carry_out_all(self.core.received(peer, header, text, self._world.network.now))

    def _tick_if_urgent(self) -> None:
        while self.process.runs and self.core.urgent:
            self._carry_out_all(self.core.handle(ev.Tick(), self._world.network.now))

    def _wake(self, due: float) -> None:
        def tick() -> None:
            self.handle(ev.Tick())
            if not self.over:
                now = self._world.network.now
                self._wake(max(self.core.next_deadline(now), now + 1e-4))

        self._world.network.at(due, lambda: self.process.tick(tick))

    # --- instructions ----------------------------------------------------------------------------

    def _carry_out_all(self, instructions: list[ev.Instruction]) -> None:
        if instructions:
            self.process.each(instructions, self._carry_out)
        self._tick_if_urgent()

    def _carry_out(self, instruction: ev.Instruction) -> None:
        world = self._world
        match instruction:
            case Post():
                self._post(instruction)
            case Sum():
                assert self._sharing is not None
                self._sharing.add(instruction)
            case Reduce():
                assert self._workspace is not None
                self._workspace.reduce(instruction)
            case Send(peer, level, header, place, _):
                self._send(peer, level, header, place)
            case ev.SendText(peer, level, header, text):
                world.wires.send(self.server, peer, level, Parcel(header, text, self.core.view))
            case ev.Beat(peer, level):
                world.wires.beat(self.server, peer, level)
            case ev.Tell(message):
                world.tell(self.server, message)
            case ev.Open(step, scratch_elements, _, left) if left:
                assert self._workspace is not None
                world.point("resume", f"server {self.server} goes on with {left} of step {step}", self.server)
                self._workspace = self._workspace.resume(left, scratch_elements)
                self._step_view = self.core.view
            case ev.Open(_, scratch_elements, follows):
                vector = self._contribution if follows is None else neutral(follows)
                assert vector is not None
                self._workspace = Workspace(vector, scratch_elements, "sum")
                self._step_view = self.core.view
                if self._sharing is not None:
                    assert self._step_view is not None
                    self._sharing.bring(vector, self._workspace.result, self._step_view.members)
            case ev.Prepare(epoch, _):
                ready = partial(self.process.run, partial(self.handle, ev.Prepared(epoch)))
                world.network.after(world.network.random.uniform(0, 0.01), ready)
            case ev.Keep(step, epoch, contributors):
                assert self._workspace is not None
                assert self._step_view is not None
                world.point("keep", f"server {self.server} keeps step {step}", self.server)
                self._keeps[step] = _Kept(epoch, contributors, self._step_view, self._workspace.result)
                self._workspace = None
            case ev.Replay(step):
                kept = self._keeps.pop(step)
                self._committed(step, kept.epoch, kept.contributors, kept.view, kept.result)
            case ev.Expect(nbytes):
                self._gift = bytearray(nbytes)
            case ev.StateHere(step, digests):
                self._state_here(step, digests)
            case ev.Commit(step, epoch, contributors):
                assert self._workspace is not None
                assert self._step_view is not None
                self._check_contribution(step)
                result, self._workspace, self._contribution = self._workspace.result, None, None
                self._committed(step, epoch, contributors, self._step_view, result)
            case ev.Retry(step, epoch):
                world.point("retry", f"server {self.server} retries step {step} in epoch {epoch}")
                world.promises.retried(self.server, step, epoch)
                self._check_contribution(step)
                self._prepare(step)
            case ev.Installed(view):
                self._installed(view)
            case ev.Links(wanted):
                world.wires.want(self.server, wanted)
            case ev.Fence():
                world.wires.fence(self.server)
            case ev.Resume():
                for peer, level in world.wires.waiting(self.server):
                    self.arrived(peer, level)
            case ev.Stop(error):
                self._stopped(error)
            case ev.Leave():
                self._leave()

    def _post(self, post: Post) -> None:
        assert self._sharing is not None
        if post.stage is Stage.COMPLETE:
            self._enter(post.step, post.epoch)
        self._sharing.post(post)

    def _enter(self, step: int, epoch: int) -> None:
        if self._entered != (step, epoch):
            self._entered = (step, epoch)
            self._world.promises.entered(self.server, step, epoch)
            self._world.point("complete", f"server {self.server} is complete in step {step}")

    def _send(self, peer: int, level: int, header: Header, place: Place | None) -> None:
        payload = b""
        if place is not None and place.buffer == Buffer.STATE:
            payload = bytes(self._gift[place.offset : place.offset + header.nbytes])
            world = self._world
            world.point(
                "piece", f"server {self.server} sends {header.start}:{header.stop} of the state", peer
            )
        elif place is not None:
            assert self._workspace is not None
            payload = bytes(self._workspace.view(place, header.stop - header.start))
        if header.kind == Kind.TOKEN:
            self._enter(header.step, header.epoch)
        # What is sent is what the core said in the view of its stamp, even if it is carried out later.
        view = self.core.view if self.core.epoch == header.epoch else None
        self._world.wires.send(self.server, peer, level, Parcel(header, payload, view))

    # --- the user --------------------------------------------------------------------------------

    def _planner(self, fabric: Fabric, server: int) -> AnyPrograms:
        if self._world.host is not None:
            grain = 4 * self._world.slice_nbytes
            return OneProgram(DirectProgram(server, fabric.servers, _GRAIN_NBYTES, grain))
        return _programs(fabric, self._world.algorithm, self._world.constants, server)

    def _installed(self, view: View) -> None:
        what = f"view {view.epoch} of {view.members}, commit {view.commit}"
        self._world.point("installed", f"server {self.server} installs {what}", self.server)
        self._world.promises.installed(self.server, view)
        if len(self.core.views) == 1 and self.life is None:
            self._prepare(1)

    def _prepare(self, step: int) -> None:
        """The user's thread: compute this server's part for the view of now, some time later submit it."""
        view = self.core.view
        assert view is not None
        world = self._world
        batch = self._batches.batch(step - 1)
        parts = assignment(np.arange(len(batch.indices)), self._base, view.contributors)
        rows = samples(len(batch.indices), world.n_elements, step)
        mine = np.concatenate(parts[self.server]) if self.server in parts else batch.indices[:0]
        contribution: Array = rows[mine].sum(axis=0)
        give = self._copy(step - 1)

        def submit() -> None:
            if self.over:
                return
            if self._leaving:
                self.handle(ev.Go("it was asked to"))
                return
            if give is not None:
                self.handle(give)
            world.point("submit", f"server {self.server} submits step {step} in epoch {view.epoch}")
            self._contribution, self._kept = contribution, contribution.copy()
            call = Call("sum", contribution.dtype.str, contribution.size, "allreduce sum")
            self.handle(ev.Submit(step, view.epoch, call, _SIGNATURE))

        world.network.after(world.network.random.uniform(0, 0.01), lambda: self.process.run(submit))

    def _copy(self, step: int) -> ev.Give | ev.Gives | None:
        """At the boundary after `step`: what of the state a joiner is to get from here, if there is one."""
        giving = self.core.giving
        if step == 0:
            return ev.Gives()
        if giving is None or giving.epoch == self._given:
            return None
        self._given = giving.epoch
        state = memoryview(msgspec.msgpack.encode(self._state()))
        heads, self._gift = cut(state, giving.gifts)
        return ev.Give(giving, step, heads)

    def _state(self) -> _State:
        return _State(self._params.tobytes(), self._base, self.ledger.dump())

    def _state_here(self, step: int, digests: dict[Part, str]) -> None:
        verify(memoryview(self._gift), digests)
        state = msgspec.msgpack.decode(self._gift, type=_State)
        self._params = np.frombuffer(state.params).copy()
        self._base, self.ledger = state.base, Ledger.load(state.ledger)
        self._world.point("state", f"server {self.server} has the state after step {step}", self.server)
        self._world.promises.state(self.server, step, self._params)
        self._keeps = {kept: what for kept, what in self._keeps.items() if kept > step}
        self.first_step = step + 1
        if step < self._world.steps:
            self._prepare(step + 1)

    def _check_contribution(self, step: int) -> None:
        if self._contribution is not None and self._kept is not None:
            self._world.promises.contribution(self.server, step, self._contribution, self._kept)

    def _committed(
        self, step: int, epoch: int, contributors: tuple[int, ...], view: View, result: Array
    ) -> None:
        world = self._world
        assert self.core.view is not None
        if self._sharing is not None:
            self._sharing.fetch()
        assert (view.epoch, view.contributors) == (epoch, contributors)
        world.point("commit", f"server {self.server} commits step {step} of epoch {epoch} by {contributors}")
        batch = self._batches.batch(step - 1)
        right = samples(len(batch.indices), world.n_elements, step).sum(axis=0)
        world.promises.committed(self.server, step, view, self.core.view, result, right)
        self._params = self._params + result.astype(np.float64)
        world.promises.state(self.server, step, self._params)
        world.history.commit_at_s.setdefault(step, []).append(world.network.now)
        used = used_indices(assignment(batch.indices, self._base, contributors), recomputed=True)
        self.ledger.commit(step, batch, contributors, used)
        self._base = contributors
        if step == world.steps:
            self.done = True
            self.handle(ev.Ended("done"))
        else:
            self._prepare(step + 1)

    def _stopped(self, error: BmlError) -> None:
        self._world.point("stopped", f"server {self.server} is stopped: {error}")
        self._world.history.errors[self.server] = error
        if not self.done:
            self.handle(ev.Ended("stopped"))
        self.over = True

    def _leave(self) -> None:
        if not (self.done or self.over):
            raise PromiseBroken(4, f"server {self.server} leaves, its user waits for ever")
        self.over = True
        self._world.network.after(_LINGER_S, self._end)

    def _end(self) -> None:
        self.process.die()
        self._world.wires.die(self.server)


__all__ = ["Machine", "World", "samples"]
