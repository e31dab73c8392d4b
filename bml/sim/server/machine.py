"""One simulated server: the shell round a real core, with real memory, real arithmetic and a user."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from bml.errors import StateMismatch, StepMismatch, TooSlow
from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.server.kept_results import KeptResults
from bml.protocol.server.watch import links_of
from bml.protocol.step.dataflow import Buffer, Place, Reduce, Send
from bml.protocol.step.direct import Post, Quit, Stage, Sum
from bml.protocol.wire import messages as msg
from bml.protocol.wire.frame import Kind
from bml.protocol.wire.messages import View
from bml.schedule import AnyPrograms, DirectProgram, OneProgram, Programs, Schedules
from bml.schedule.select.model import Constants
from bml.sim.judge.promises import PromiseBroken
from bml.sim.server.context import World
from bml.sim.server.memory import KeptResult, Memory
from bml.sim.server.sharing import Sharing
from bml.sim.server.user import User
from bml.sim.world.coordinators import Channel
from bml.sim.world.process import Process
from bml.sim.world.wires import Parcel
from bml.topology import Fabric
from bml.topology.errors import BmlError
from bml.train.ledger import Ledger

_SIGNATURE = 7
_LINGER_S = 0.2  # as bml.cluster.server.execution
_GRAIN_NBYTES = 8


_LARGE = 64
_many_schedules = lru_cache(maxsize=512)(Schedules)
_few_schedules = lru_cache(maxsize=2)(Schedules)  # each may have 40 MB of trees


def _programs(fabric: Fabric, algorithm: str, constants: Constants, server: int) -> Programs:
    if fabric.n_servers > _LARGE:
        return Programs(_few_schedules(fabric, algorithm, constants), server)
    return _small_programs(fabric, algorithm, constants, server)


@lru_cache(maxsize=1 << 14)
def _small_programs(fabric: Fabric, algorithm: str, constants: Constants, server: int) -> Programs:
    return Programs(_many_schedules(fabric, algorithm, constants), server)


class Machine:
    """The shell round the core of `server`, in this `incarnation` (None: its first)."""

    def __init__(self, server: int, world: World, incarnation: msg.Incarnation | None = None):
        self.server = server
        self.incarnation = incarnation
        self.process = Process()
        self.channel: Channel | None = None
        self.n_told = 0
        """How many messages of coordinators have come."""
        self.over = False
        self._world = world
        self._planned = world.fabric
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
        keeps: KeptResults[KeptResult] = KeptResults()
        self.user = User(server, world, self.core, self.process, self.handle, keeps if incarnation else None)
        self._entered: tuple[int, int] | None = None
        self._beaten = dict.fromkeys(links_of(world.fabric, server), 0.0)
        """When a heartbeat was sent last, to a peer over a level; before the first view to no neighbour."""
        sharing = Sharing(server, world.host, world, self.process, self.handle) if world.host else None
        self._memory = Memory(server, world, self.core, self.user, keeps, sharing)
        self._handlers = self._handlers_of(self._memory) | (self._shared_handlers(sharing) if sharing else {})

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
        """The user learns that its server must leave: it stops before the next step."""
        self.user.leaves = True

    def go(self) -> None:
        """It said that it leaves, and waits for no view without it any longer."""
        if not self.over:
            self.user.stop()
            self.over = True
            self._world.left(self.server, is_done=False)

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
        """The first step whose result the user got."""
        return self.user.first_step

    @property
    def ledger(self) -> Ledger:
        """The user's account of the samples that are in the results."""
        return self.user.ledger

    @property
    def _now(self) -> float:
        """The time on this machine's clock."""
        return self._world.network.now - self.process.behind_s

    def waits_for(self) -> str:
        """A text: what this server waits for."""
        if not self.process.runs:
            return "frozen" if self.process.alive else "dead"
        return self.core.waits_for()

    # --- events ----------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """Let the core react, and carry out its instructions."""
        self._carry_out_all(self.core.handle(event, self._now))

    def told(self, message: msg.ToServer) -> None:
        """See `Reachable`."""
        self.n_told += 1
        self.handle(ev.Control(message))

    @property
    def is_led(self) -> bool:
        """See `Reachable`."""
        return self.channel is not None

    def arrived(self, peer: int, level: int) -> None:
        """Something may be taken off a connection, until a frame must wait."""
        wires = self._world.wires
        while self.process.runs:
            parcel = wires.peek(self.server, peer, level)
            if parcel is None:
                return
            self.core.heard(peer, level, self._now)
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

    def heard(self, peer: int, level: int, stands_in: bool = False) -> None:
        """A heartbeat came in, of the peer or of its stand-in."""
        self.core.heard(peer, level, self._now)
        if stands_in:
            self.handle(ev.StoodIn(peer, level))

    @property
    def awaited_s(self) -> float:
        """For how long it is awaited if its stand-in speaks: in no view nobody hears that."""
        return self._world.timeouts.hold_s if self.core.view else self._world.timeouts.detect_s

    def stand_in(self) -> None:
        """From now on the stand-in speaks: until the process runs again, or is dead, or hold_s are over."""
        world, network = self._world, self._world.network
        interval_s, ends_at = world.timeouts.heartbeat_s, network.now + world.timeouts.hold_s
        last = max(self._beaten.values(), default=0.0)
        links = [link for link, at in self._beaten.items() if last - at < interval_s]

        def speak() -> None:
            if self.process.frozen and network.now <= ends_at:
                for peer, level in links:
                    world.wires.heartbeat(self.server, peer, level, stands_in=True)
                network.after(interval_s, speak)

        network.after(interval_s / 2, speak)

    def _take(self, peer: int, parcel: Parcel, verdict: Place | ev.Verdict) -> None:
        header = parcel.header
        text = ""
        if header.kind in (Kind.DESCRIBE, Kind.HEAD):
            text = parcel.payload.decode()
        else:
            self._world.promises.admitted(self.server, peer, parcel.view, self.core.view)
        if isinstance(verdict, Place) and not self._memory.write(parcel, verdict):
            return
        self._carry_out_all(self.core.received(peer, header, text, self._now))

    def _tick_if_urgent(self) -> None:
        while self.process.runs and self.core.urgent:
            self._carry_out_all(self.core.handle(ev.Tick(), self._now))

    def _wake(self, due: float) -> None:
        def tick() -> None:
            world = self._world
            self.core.flows(world.wires.flows(self.server), self._now)
            self.handle(ev.Tick())
            if not self.over:
                now = self._now
                self._wake(max(self.core.next_deadline(now), now + 1e-4))

        self._world.network.at(self.process.when_s(due), lambda: self.process.tick(tick))

    # --- instructions ----------------------------------------------------------------------------

    def _carry_out_all(self, instructions: list[ev.Instruction]) -> None:
        if instructions:
            self.process.each(instructions, self._carry_out)
        self._tick_if_urgent()

    def _carry_out(self, instruction: ev.Instruction) -> None:
        self._handlers[type(instruction)](instruction)

    def _handlers_of(self, memory: Memory) -> dict[type, Callable[[Any], None]]:
        """Instruction -> the function that carries it out, without those of steps over shared memory."""
        server, world, user = self.server, self._world, self.user
        wires = world.wires
        return {
            Reduce: memory.reduce,
            Send: self._send,
            ev.SendText: self._send_text,
            ev.Open: memory.open,
            ev.Commit: memory.commit,
            ev.Retry: self._retry,
            ev.BufferResult: memory.keep,
            ev.DiscardResult: memory.skip,
            ev.ResultsDropped: memory.behind,
            ev.Replay: memory.replay,
            ev.AllocateState: memory.expect,
            ev.StateComplete: memory.state_complete,
            ev.Begin: lambda begin: user.begin(begin.replays),
            ev.ContributeNeutral: lambda called: self._later(0.003, ev.Follow(called.submit)),
            ev.Prepare: lambda prepare: self._later(0.01, ev.Prepared(prepare.epoch)),
            ev.Heartbeat: self._heartbeat,
            ev.Probe: lambda to: wires.probe(server, to.peer, to.level),
            ev.Tell: lambda tell: world.tell(server, tell.message),
            ev.Links: lambda links: self._want(links.wanted),
            ev.Fence: lambda _: self._fence(),
            ev.Resume: lambda _: self._resume(),
            ev.Installed: lambda installed: self._installed(installed.view),
            ev.Stop: lambda stop: self._stopped(stop.error),
            ev.Exit: lambda _: self._leave(),
        }

    def _shared_handlers(self, sharing: Sharing) -> dict[type, Callable[[Any], None]]:
        """The same for steps over shared memory."""

        def post(instruction: Post) -> None:
            if instruction.stage is Stage.COMPLETE:
                self._enter(instruction.step, instruction.epoch)
            sharing.post(instruction)

        return {
            Post: post,
            Sum: sharing.add,
            Quit: lambda quits: sharing.quit(quits.epoch),
            ev.FetchResult: sharing.fetch_result,
        }

    def _later(self, within_s: float, event: ev.Event) -> None:
        """Another thread does the work that the core has asked for; then this event reports it."""
        network = self._world.network
        say = partial(self.process.run, partial(self.handle, event))
        network.after(network.random.uniform(0, within_s), say)

    def _retry(self, instruction: ev.Retry) -> None:
        step, epoch = instruction.step, instruction.epoch
        self._world.point("retry", f"server {self.server} retries step {step} in epoch {epoch}")
        self._world.promises.retried(self.server, step, epoch)
        self.user.take_back(step)
        self.user.prepare(step)

    def _fence(self) -> None:
        self._memory.fence()
        self._world.wires.fence(self.server)

    def _resume(self) -> None:
        for peer, level in self._world.wires.waiting(self.server):
            self.arrived(peer, level)

    def _enter(self, step: int, epoch: int) -> None:
        if self._entered != (step, epoch):
            self._entered = (step, epoch)
            self._world.promises.entered(self.server, step, epoch)
            self._world.point("complete", f"server {self.server} is complete in step {step}", self.server)

    def _send(self, instruction: Send) -> None:
        peer, level, header, place, _ = instruction
        payload, reference = b"", None
        if place is not None:
            if place.buffer == Buffer.STATE:
                text = f"server {self.server} sends {header.start}:{header.stop} of the state"
                self._world.point("piece", text, peer)
            payload, reference = self._memory.read(header, place)
        if header.kind == Kind.TOKEN:
            self._enter(header.step, header.epoch)
        # The frame belongs to the view of its stamp, even if it is carried out later.
        view = self.core.view if self.core.epoch == header.epoch else None
        self._world.wires.send(self.server, peer, level, Parcel(header, payload, view, reference))

    def _want(self, links: frozenset[tuple[int, int]]) -> None:
        self._beaten.update(dict.fromkeys(links, self._world.network.now))
        self._world.wires.want(self.server, links)

    def _heartbeat(self, to: ev.Heartbeat) -> None:
        self._beaten[to.peer, to.level] = self._world.network.now
        self._world.wires.heartbeat(self.server, to.peer, to.level)

    def _send_text(self, instruction: ev.SendText) -> None:
        parcel = Parcel(instruction.header, instruction.text, self.core.view)
        self._world.wires.send(self.server, instruction.peer, instruction.level, parcel)

    # --- the beginning and the end ---------------------------------------------------------------

    def _planner(self, fabric: Fabric, server: int) -> AnyPrograms:
        self._planned = fabric
        if self._world.host is not None:
            meeting_nbytes = self._world.settings.slice_nbytes // 4  # so that vectors are added in both ways
            return OneProgram(DirectProgram(server, fabric.servers, _GRAIN_NBYTES, meeting_nbytes))
        return _programs(fabric, self._world.settings.algorithm, self._world.settings.constants, server)

    def _installed(self, view: View) -> None:
        what = f"view {view.epoch} of {view.members}, commit {view.commit}"
        self._world.point("installed", f"server {self.server} installs {what}", self.server)
        self._world.promises.installed(self.server, view, self._planned)
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
        self._world.left(self.server, is_done=False)

    def _leave(self) -> None:
        if not (self.user.ended or self.over):
            raise PromiseBroken(4, f"server {self.server} leaves, its user waits for ever")
        self._world.left(self.server, is_done=not self.over)
        self.over = self.user.over = True
        self._world.network.after(_LINGER_S, self.end)

    def end(self) -> None:
        """The process ends."""
        self.process.die()
        self._world.wires.die(self.server)


__all__ = ["Machine"]
