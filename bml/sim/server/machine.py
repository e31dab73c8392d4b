"""One simulated server: the shell round a real core, with real memory, real arithmetic and a user."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

from bml.errors import StateMismatch, StepMismatch, TooSlow
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.server.kept_results import KeptResults
from bml.protocol.step.dataflow import Buffer, Place, Reduce, Send
from bml.protocol.step.direct import Post, Quit, Stage, Sum
from bml.protocol.step.workspace import Array, Workspace
from bml.protocol.wire import messages as msg
from bml.protocol.wire.call import neutral
from bml.protocol.wire.frame import Header, Kind
from bml.protocol.wire.messages import View
from bml.schedule import AnyPrograms, DirectProgram, OneProgram, Programs, Schedules
from bml.schedule.select.model import Constants
from bml.sim.judge.promises import PromiseBroken
from bml.sim.judge.zero_copy import ZeroCopySender
from bml.sim.server.context import World
from bml.sim.server.sharing import Sharing
from bml.sim.server.user import User
from bml.sim.world.coordinators import Channel
from bml.sim.world.process import Process
from bml.sim.world.wires import Parcel
from bml.topology import Fabric
from bml.topology.errors import BmlError
from bml.train.ledger import Ledger

_SIGNATURE = 7
_LINGER_S = 0.2
_GRAIN_NBYTES = 8


class _Kept(NamedTuple):
    """The result of a step that a learner followed."""

    epoch: int
    contributors: tuple[int, ...]
    view: View
    result: Array


@lru_cache(maxsize=1 << 14)
def _programs(fabric: Fabric, algorithm: str, constants: Constants, server: int) -> Programs:
    return Programs(_schedules(fabric, algorithm, constants), server)


@lru_cache(maxsize=512)
def _schedules(fabric: Fabric, algorithm: str, constants: Constants) -> Schedules:
    return Schedules(fabric, algorithm, constants)


class Machine:
    """See the module's text."""

    def __init__(self, server: int, world: World, incarnation: msg.Incarnation | None = None):
        self.server = server
        self.incarnation = incarnation
        self.process = Process()
        self.channel: Channel | None = None
        self.over = False
        self._world = world
        self.core = ServerCore(
            server,
            world.fabric,
            self._planner,
            world.timeouts,
            lambda nbytes: world.settings.slice_nbytes,
            world.network.now,
            incarnation,
            world.settings.kept_nbytes,
        )
        self._workspace: Workspace | None = None
        self._zero_copy_sender = ZeroCopySender(server)
        self._keeps: KeptResults[_Kept] = KeptResults()
        self.user = User(
            server, world, self.core, self.process, self.handle, self._keeps if incarnation else None
        )
        self._entered: tuple[int, int] | None = None
        self._step_view: View | None = None
        self._wake_at = float("inf")
        self._sharing: Sharing | None = None
        if world.host is not None:
            self._sharing = Sharing(server, world.host, world, self.process, self.handle)

    def start(self) -> None:
        """The process starts to run."""
        network = self._world.network
        self._wake(network.now + network.random.uniform(0, 0.02))
        if self.incarnation is not None:
            loads_s = network.random.choice((0.002, 0.05))
            network.after(network.random.uniform(0, loads_s), lambda: self.process.run(self._ready))

    def _ready(self) -> None:
        self.handle(ev.Ready())

    def leave(self) -> None:
        """The user is told that his server must go: he stops before the next step."""
        self.user.leaves = True

    @property
    def done(self) -> bool:
        """Whether its user has had all results."""
        return self.user.done

    @property
    def works(self) -> bool:
        """Whether it runs, and has neither given up nor said that it leaves."""
        return self.process.runs and not self.over and not self.user.goes

    @property
    def first_step(self) -> int:
        """The first step whose result its user was given."""
        return self.user.first_step

    @property
    def ledger(self) -> Ledger:
        """What its user knows of the samples that are in the results."""
        return self.user.ledger

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

    def proved(self, peer: int, level: int) -> None:
        """A probe came back."""
        self.handle(ev.Proved(peer, level))

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
            self.user.state_bytes[verdict.offset : verdict.offset + header.nbytes] = parcel.payload
        elif isinstance(verdict, Place):
            assert self._workspace is not None
            assert parcel.reference is not None
            if not parcel.reference.good(self.server, header, parcel.payload) and self._world.zero_copy:
                return
            self._workspace.view(verdict, header.stop - header.start)[:] = parcel.payload
        self._carry_out_all(self.core.received(peer, header, text, self._world.network.now))

    def _tick_if_urgent(self) -> None:
        while self.process.runs and self.core.urgent:
            self._carry_out_all(self.core.handle(ev.Tick(), self._world.network.now))

    def _wake(self, due: float) -> None:
        def tick() -> None:
            world = self._world
            self.core.flows(world.wires.flows(self.server), world.network.now)
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
            case ev.Heartbeat(peer, level):
                world.wires.heartbeat(self.server, peer, level)
            case ev.Probe(peer, level):
                world.wires.probe(self.server, peer, level)
            case ev.Tell(message):
                world.tell(self.server, message)
            case ev.Open(step, scratch_elements, _, left) if left:
                assert self._workspace is not None
                world.point("resume", f"server {self.server} goes on with {left} of step {step}", self.server)
                self._workspace = self._workspace.resume(left, scratch_elements)
                self._step_view = self.core.view
            case ev.Open(step, scratch_elements, follows):
                vector = self.user.contribution if follows is None else neutral(follows)
                assert vector is not None
                self._workspace = Workspace(vector, scratch_elements, "sum")
                self._step_view = self.core.view
                if self._sharing is not None:
                    assert self._step_view is not None
                    members, result = self._step_view.members, self._workspace.result
                    self._sharing.bring(step, vector, result, members, follows is not None)
            case Quit(epoch):
                assert self._sharing is not None
                self._sharing.quit(epoch)
            case ev.FetchResult():
                assert self._sharing is not None
                self._sharing.fetch_result(instruction)
            case ev.Called(submit):
                follow = partial(self.process.run, partial(self.handle, ev.Follow(submit)))
                world.network.after(world.network.random.uniform(0, 0.003), follow)
            case ev.Prepare(epoch, _):
                ready = partial(self.process.run, partial(self.handle, ev.Prepared(epoch)))
                world.network.after(world.network.random.uniform(0, 0.01), ready)
            case ev.Keep(step, epoch, contributors):
                assert self._workspace is not None
                assert self._step_view is not None
                if self._sharing is not None:
                    self._sharing.take()
                world.point("keep", f"server {self.server} keeps step {step}", self.server)
                kept = _Kept(epoch, contributors, self._step_view, self._workspace.result)
                self._keeps.keep(step, kept)
                self._workspace = None
                world.promises.keeps(
                    self.server, len(self._keeps.steps), kept.result.nbytes, world.settings.kept_nbytes
                )
                self.user.kept()
            case ev.Skip():
                self._workspace = None
            case ev.Behind(step):
                world.point(
                    "behind", f"server {self.server} keeps no result from step {step} on", self.server
                )
                self._keeps.behind(step)
                self.user.fall_behind()
            case ev.Begin(replays):
                self.user.begin(replays)
            case ev.Replay(step):
                kept = self._keeps.pop(step)
                self.user.committed(step, kept.epoch, kept.contributors, kept.view, kept.result)
            case ev.Expect(nbytes):
                self.user.state_bytes = bytearray(nbytes)
            case ev.StateHere(step, digests):
                self._keeps.here(step)
                self.user.state_here(step, digests)
            case ev.Commit(step, epoch, contributors):
                assert self._workspace is not None
                assert self._step_view is not None
                self._zero_copy_sender.committed = step
                self.user.take_back(step)
                if self._sharing is not None:
                    self._sharing.take()
                result, self._workspace = self._workspace.result, None
                self.user.committed(step, epoch, contributors, self._step_view, result)
            case ev.Retry(step, epoch):
                world.point("retry", f"server {self.server} retries step {step} in epoch {epoch}")
                world.promises.retried(self.server, step, epoch)
                self.user.take_back(step)
                self.user.prepare(step)
            case ev.Installed(view):
                self._installed(view)
            case ev.Links(wanted):
                world.wires.want(self.server, wanted)
            case ev.Fence():
                self._zero_copy_sender.fences += 1
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
            self._world.point("complete", f"server {self.server} is complete in step {step}", self.server)

    def _send(self, peer: int, level: int, header: Header, place: Place | None) -> None:
        payload, reference = b"", None
        if place is not None and place.buffer == Buffer.STATE:
            payload = bytes(self.user.state_bytes[place.offset : place.offset + header.nbytes])
            world = self._world
            world.point(
                "piece", f"server {self.server} sends {header.start}:{header.stop} of the state", peer
            )
        elif place is not None:
            assert self._workspace is not None
            referenced = self._workspace.view(place, header.stop - header.start)
            payload, reference = bytes(referenced), self._zero_copy_sender.reference_for(referenced)
        if header.kind == Kind.TOKEN:
            self._enter(header.step, header.epoch)
        # What is sent is what the core said in the view of its stamp, even if it is carried out later.
        view = self.core.view if self.core.epoch == header.epoch else None
        self._world.wires.send(self.server, peer, level, Parcel(header, payload, view, reference))

    # --- the beginning and the end ---------------------------------------------------------------

    def _planner(self, fabric: Fabric, server: int) -> AnyPrograms:
        if self._world.host is not None:
            meeting_nbytes = self._world.settings.slice_nbytes // 4  # so that vectors are added in both ways
            return OneProgram(DirectProgram(server, fabric.servers, _GRAIN_NBYTES, meeting_nbytes))
        return _programs(fabric, self._world.settings.algorithm, self._world.settings.constants, server)

    def _installed(self, view: View) -> None:
        what = f"view {view.epoch} of {view.members}, commit {view.commit}"
        self._world.point("installed", f"server {self.server} installs {what}", self.server)
        self._world.promises.installed(self.server, view)
        if len(self.core.views) == 1 and self.incarnation is None:
            self.user.come_to(1)

    def _stopped(self, error: BmlError) -> None:
        self._world.point("stopped", f"server {self.server} is stopped: {error}")
        self._world.history.errors[self.server] = error
        learner = self.core._learner
        if learner is not None and learner.behind and not learner.waits and self.user.waits_for_state:
            raise PromiseBroken(4, f"server {self.server} waits for a state, its core does not know it")
        if isinstance(error, StepMismatch | StateMismatch | TooSlow) and not self.user.ended:
            self.user.fail(error)
        self.user.stop()
        self.over = True

    def _leave(self) -> None:
        if not (self.user.ended or self.over):
            raise PromiseBroken(4, f"server {self.server} leaves, its user waits for ever")
        self.over = self.user.over = True
        self._world.network.after(_LINGER_S, self._end)

    def _end(self) -> None:
        self.process.die()
        self._world.wires.die(self.server)


__all__ = ["Machine"]
