"""Simulated coordinators, one after the other or two at once, and the control connections to the servers.

The launcher (launcher.py), or the rank whose turn it is (ranks.py), starts the successor of one that is dead,
or that it takes for dead: one that was stopped may still believe that it is the coordinator when it thaws. As
in `bml.cluster`, coordinators dial the servers and keep dialling; the newest connection to a server replaces
the one before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from bml.protocol.coordinator import core as coord
from bml.protocol.server.core import ServerCore
from bml.protocol.server.events import Event
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.validate import check_for_server, check_from_server
from bml.sim.world.launcher import Launcher
from bml.sim.world.load import Load
from bml.sim.world.network import Network
from bml.sim.world.process import Process
from bml.sim.world.ranks import Ranks
from bml.sim.world.settings import Settings
from bml.topology import Fabric, InvariantError

_REDIAL_S = 0.05  # as bml.cluster.process.coordinator
_WAYS = ("down", "up")
_HOP_S = (0.0005, 0.002)  # of the control network, one way


class Reachable(Protocol):
    """A server as a coordinator sees it."""

    process: Process
    core: ServerCore
    channel: Channel | None
    incarnation: msg.Incarnation | None
    over: bool
    n_told: int

    @property
    def is_led(self) -> bool:
        """Whether the line to a coordinator is open."""

    def handle(self, event: Event) -> None:
        """Let the core react."""

    def told(self, message: msg.ToServer) -> None:
        """A message of a coordinator came in."""


def _number(server: Reachable) -> int:
    return server.incarnation.number if server.incarnation else 0


class Channel:
    """One control connection, ordered both ways; messages under way in the `lost` ways are lost with it."""

    def __init__(self, coordinator: SimulatedCoordinator, server: int):
        self.coordinator = coordinator
        self.server = server
        self.open = True
        self.lost: frozenset[str] = frozenset()


class SimulatedCoordinator:
    """One coordinator: its process, its core, its channels. `host`: the rank that started it, if one did."""

    def __init__(
        self,
        owner: SimulatedCoordinators,
        term: int,
        core: coord.Coordinator,
        process: Process,
        host: int | None = None,
    ):
        self.owner = owner
        self.term = term
        self.core = core
        self.process, self.host = process, host
        self.over = False
        """Whether its loop has ended; its process may run on."""
        self.numbers: dict[int, int] = {}
        """Server -> the newest incarnation of which it knows where it is reached."""
        self.channels: dict[int, Channel] = {}
        self.finished: coord.Finished | None = None
        self.failing_since: dict[int, float] = {}
        self._wake_at = float("inf")
        self._said: tuple[str, int] | None = None

    def handle(self, event: coord.Event) -> None:
        """Let the core react, and carry out its instructions."""
        if self.over:
            return
        self.process.each(self.core.handle(event, self.now), self._carry_out)
        for incarnation in self.core.view.joined if self.core.view else ():
            self.meet(incarnation.server, incarnation.number)
        self._schedule()
        self._report()

    @property
    def now(self) -> float:
        """The time on its machine's clock."""
        return self.owner.network.now - self.process.behind_s

    @property
    def text(self) -> str:
        """Where it stands, in words."""
        how = "" if self.process.runs else "frozen, " if self.process.alive else "dead, "
        return how + ("over" if self.over else self.core.state)

    @property
    def lives(self) -> bool:
        """Whether it may still act, if only when it thaws."""
        return self.process.alive and not self.over

    def meet(self, server: int, number: int) -> None:
        """Learn where this incarnation of a server is reached."""
        if self.numbers.get(server, 0) < number:
            self.numbers[server] = number
            self.owner.call(self, server)

    def heartbeat(self) -> None:
        """Give the launcher a sign of life, and again and again."""
        if self.process.alive:
            self.owner.launcher.heartbeat(self.term)
            again = partial(self.process.run, self.heartbeat)
            self.owner.network.after(self.owner.launcher.succession.interval_s, again)

    def end(self) -> None:
        """Its loop has ended, and its process if a launcher started it, which hears of that."""
        if self.over:
            return
        self.over = True
        for channel in list(self.channels.values()):
            self.owner.sever(channel)
        if self.host is None:
            self.process.die()
            self.owner.launcher.ended(self.term, f"was {self._state[0]}, and its process is gone")
        else:
            self.owner.ranks.ended(self.host, self.term, self.finished.deposed_by if self.finished else 0)

    @property
    def _state(self) -> tuple[str, int]:
        """Where it stands, and the highest term that it has heard of."""
        deposed_by = self.finished.deposed_by if self.finished else 0
        return "deposed" if deposed_by else self.core.state, max(self.term, deposed_by)

    def _report(self) -> None:
        """Tell the launcher its state, if that is new."""
        said = self._state
        if said != self._said and self.host is None:
            self._said = said
            self.owner.launcher.said(self.term, *said)

    def _carry_out(self, instruction: coord.Instruction) -> None:
        if isinstance(instruction, coord.Finished):
            self.finished = instruction
            self.owner.job.finish(self, instruction)
        elif instruction.server in self.channels:
            self.owner.post(self.channels[instruction.server], instruction.message)

    def _schedule(self) -> None:
        due = self.core.next_deadline(self.now)
        if self.lives and due < self._wake_at and not self.finished:
            self._wake_at = due
            self.owner.network.at(self.process.when_s(due), lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if due == self._wake_at:
            self._wake_at = float("inf")
            self.process.tick(lambda: self.handle(coord.Tick()))


class Job(Protocol):
    """The job as coordinators see it."""

    def point(self, name: str, text: str) -> None:
        """Something happened, to which a mishap may be tied."""

    def finish(self, coordinator: SimulatedCoordinator, finished: coord.Finished) -> None:
        """A coordinator has ended the job, or is none any more."""

    def give_up(self, why: str) -> None:
        """The launcher ends the job: it cannot get a coordinator."""


class SimulatedCoordinators:
    """All coordinators of one `job`, and its launcher or ranks; see the module's text."""

    def __init__(
        self,
        fabric: Fabric,
        network: Network,
        timeouts: Timeouts,
        settings: Settings,
        servers: Mapping[int, Reachable],
        load: Load,
        job: Job,
    ):
        self.network = network
        self.job = job
        self.launcher = Launcher(
            network, timeouts, settings.restart_s, settings.reaches, self._start, job.point, job.give_up
        )
        self.ranks = Ranks(
            network,
            timeouts,
            settings,
            servers,
            load,
            self._start_beside,
            self._refuses,
            job.point,
        )
        self.started: list[SimulatedCoordinator] = []
        self.cut: set[int] = set()
        self.cut_pairs: set[frozenset[int | None]] = set()
        """Machines that do not reach each other, but over their NICs."""
        self.failing_starts = 0
        """How many coordinators were to crash on their start."""
        self._fabric = fabric
        self._timeouts = timeouts
        self._settings = settings
        self._servers = servers
        self._late: deque[tuple[Channel, Callable[[], None]]] = deque()
        self._delays = settings.delays
        self._chance = random.Random("dials")
        self._load = load
        load.add(self.launcher.process)

    @property
    def newest(self) -> SimulatedCoordinator:
        """The coordinator that was started last."""
        return self.started[-1]

    def start(self) -> None:
        """The launcher begins, if there is one."""
        if not self._settings.elects:
            self.launcher.look()

    def came(self, server: int) -> None:
        """The process of a server begins to run, in its first incarnation or in another."""
        if self._settings.elects:
            self.ranks.came(server, _number(self._servers[server]))
        elif self._servers[server].incarnation is not None:
            for coordinator in self.started:
                self._tell(coordinator, partial(self._dial, coordinator, server))

    def left(self, server: int, is_done: bool) -> None:
        """The job is over for a server, well or with an error."""
        if self._settings.elects:
            self.ranks.left(server, is_done)

    def _start(self, term: int) -> SimulatedCoordinator:
        """Start a coordinator of the launcher: a first one, or a successor."""
        coordinator = SimulatedCoordinator(self, term, self._core(term, self.network.now), Process())
        self._load.add(coordinator.process)
        coordinator.heartbeat()
        return self._begin(coordinator)

    def _start_beside(self, term: int, host: int, process: Process) -> SimulatedCoordinator:
        """Start a coordinator of a rank, in the process that it has for them."""
        core = self._core(term, self.network.now - process.behind_s)
        coordinator = SimulatedCoordinator(self, term, core, process, host)
        view = self._servers[host].core.view
        coordinator.numbers = {each.server: each.number for each in view.joined} if view else {}
        return self._begin(coordinator)

    def _core(self, term: int, now: float) -> coord.Coordinator:
        settings = self._settings
        return coord.Coordinator(
            self._fabric, term, self._timeouts, settings.min_servers, now, settings.absent
        )

    def _begin(self, coordinator: SimulatedCoordinator) -> SimulatedCoordinator:
        if any(each.term == coordinator.term for each in self.started):
            raise InvariantError(f"two coordinators have the term {coordinator.term}")
        self.started.append(coordinator)
        host = "" if coordinator.host is None else f" beside rank {coordinator.host}"
        self.job.point("takeover", f"coordinator {coordinator.term} starts{host}")
        coordinator.handle(coord.Tick())
        for server in self._servers:
            self._dial(coordinator, server)
        return coordinator

    @property
    def leader(self) -> int | None:
        """The rank beside which the coordinator runs that has most connections, if one runs."""
        running = [each for each in self.started if each.lives and each.host is not None]
        best = max(running, key=lambda each: (len(each.channels), each.term), default=None)
        return None if best is None else best.host

    def apply_mishap(self, kind: str, for_s: float, *target: int) -> None:
        """A mishap of a coordinator, of the launcher, or of what a rank has; see bml.sim.mishaps.chaos."""
        (amount,) = target or (0,)
        match kind:
            case "store-stall":
                self.ranks.stalled_until_s = self.network.now + for_s
            case "spare-crash":
                self.ranks.lose_spare(amount)
            case "coordinator-crash" | "coordinator-freeze" if not self.started:
                pass
            case "coordinator-crash":
                self.crash()
            case "coordinator-freeze":
                self.freeze(for_s)
            case "coordinator-fails":
                self.failing_starts += amount
                self.launcher.crashes += amount
                self.ranks.crashes += amount
            case "launcher-freeze":
                self.launcher.freeze(for_s)
            case "launcher-deaf":
                self.launcher.deaf_until_s = self.network.now + for_s
            case "clock-step":
                self.launcher.clock_offset_s += amount
            case _:
                raise InvariantError(f"there is no mishap {kind}")

    def crash(self) -> None:
        """The newest coordinator dies."""
        coordinator = self.newest
        if coordinator.lives:
            self.job.point("fault", f"crash of coordinator {coordinator.term}")
            if coordinator.host is None:
                coordinator.end()
            else:
                self.ranks.lose_spare(coordinator.host)

    def freeze(self, for_s: float) -> None:
        """The newest coordinator stops for a while."""
        coordinator = self.newest
        if coordinator.process.runs and not coordinator.over:
            self.job.point("fault", f"coordinator {coordinator.term} is frozen for {for_s:.3f} s")
            if coordinator.host is None:
                coordinator.process.freeze()
            else:
                self.ranks.freeze_spare(coordinator.host)
            self._thaw_after(for_s, coordinator.process, f"coordinator {coordinator.term} thaws")

    def freeze_beside(self, server: int, for_s: float, behind_s: float) -> None:
        """The machine of a rank is stopped, with all that runs there; its clock is late by so much then."""
        spare = self.ranks.freeze_spare(server)
        if spare is not None:
            spare.behind_s += behind_s
            self._thaw_after(for_s, spare, f"the process for coordinators of rank {server} thaws")

    def _thaw_after(self, for_s: float, process: Process, text: str) -> None:
        def thaw() -> None:
            if process.frozen:
                self.job.point("fault", text)
                process.thaw()

        if for_s != float("inf"):
            self.network.after(for_s, thaw)

    def gone(self, server: int, why: str) -> None:
        """A server's process died: its connection ends, the launcher tells the newest coordinator."""
        channel = self._servers[server].channel
        if channel is not None:
            self._break(channel)
        if self._settings.elects:
            self.ranks.gone(server)
            return
        coordinator = self.newest
        self._tell(coordinator, partial(self._say, coordinator, coord.Gone(server, why)))

    def _tell(self, coordinator: SimulatedCoordinator, action: Callable[[], None]) -> None:
        """The launcher tells a coordinator, once it can."""
        self.network.deliver((coordinator, "launcher"), lambda: self.launcher.process.run(action))

    # --- control connections ---------------------------------------------------------------------

    def lose(self, server: int) -> None:
        """Break the control connection of a server; both ends notice, the coordinator dials again."""
        channel = self._servers[server].channel
        if channel is not None:
            self._break(channel, *_WAYS)

    def hold(self, server: int) -> None:
        """Hold back everything between a server and the coordinators, both ways."""
        self.cut.add(server)

    def release(self, server: int) -> None:
        """End a `hold`: messages that were held back come through."""
        self.cut.discard(server)
        self._bring_late()

    def hold_pair(self, pair: frozenset[int | None]) -> None:
        """Hold back everything between a server and the coordinators beside another one, both ways."""
        self.cut_pairs.add(pair)

    def release_pair(self, pair: frozenset[int | None]) -> None:
        """End a `hold_pair`."""
        self.cut_pairs.discard(pair)
        self._bring_late()

    def _bring_late(self) -> None:
        late, self._late = self._late, deque()
        for channel, action in late:
            if self._is_cut(channel.coordinator, channel.server):
                self._late.append((channel, action))
            else:
                action()

    def _refuses(self, a: int, b: int) -> bool:
        """Whether a connection of server a shows that the process of server b is gone."""
        return not (self._servers[b].process.alive or {a, b} & self.cut)

    def _is_cut(self, coordinator: SimulatedCoordinator, server: int) -> bool:
        host = coordinator.host
        cut_off = server in self.cut or host in self.cut or frozenset((host, server)) in self.cut_pairs
        return host != server and cut_off

    def post(self, channel: Channel, message: msg.ToServer) -> None:
        """A message of a coordinator."""
        node = self._servers[channel.server]
        if not isinstance(message, msg.Who):
            who = f"coordinator {channel.coordinator.term} -> {channel.server}"
            self.job.point(type(message).__name__, f"{who}: {message}")

        def read() -> None:
            if channel is node.channel:
                node.told(check_for_server(message, self._fabric))  # as the real one does
                self.ranks.news(channel.server)

        if channel.open:
            self._move(channel, "down", lambda: node.process.run(read))

    def tell(self, server: int, message: msg.ToCoordinator) -> None:
        """A message of a server to the coordinator that holds its connection; lost when there is none."""
        channel = self._servers[server].channel
        if not isinstance(message, msg.Progress):
            self.job.point(type(message).__name__, f"server {server} -> coordinator: {message}")
        if channel is not None and channel.open:
            coordinator = channel.coordinator
            said = coord.From(server, check_from_server(message, server, self._fabric))
            self._move(channel, "up", lambda: self._say(coordinator, said, channel))

    def _say(
        self, coordinator: SimulatedCoordinator, event: coord.Event, channel: Channel | None = None
    ) -> None:
        def read() -> None:
            if channel is None or coordinator.channels.get(channel.server) is channel:
                coordinator.handle(event)

        coordinator.process.run(read)

    def _move(self, channel: Channel, way: str, arrive: Callable[[], None]) -> None:
        """Bring something over, in order; hold it back while the server is cut off."""

        def come() -> None:
            if way not in channel.lost:
                self._unless_cut(channel, arrive)

        self._deliver(channel, way, come)

    def _unless_cut(self, channel: Channel, action: Callable[[], None]) -> None:
        """Hold something back while the server, or the coordinator, is cut off."""
        if self._is_cut(channel.coordinator, channel.server):
            self._late.append((channel, action))
        else:
            action()

    def _deliver(self, channel: Channel, way: str, action: Callable[[], None]) -> None:
        way_s = self._delays.control.get(channel.server, 0.0) + self._load.late_s()
        self.network.deliver((channel, way), action, way_s)

    def sever(self, channel: Channel) -> None:
        """The process at the coordinator's end is no more."""
        self._break(channel)

    def _break(self, channel: Channel, *lost: str) -> None:
        """The connection is over; each end learns it, the coordinator dials again."""
        if not channel.open:
            return
        channel.open, channel.lost = False, frozenset(lost)
        node, coordinator = self._servers[channel.server], channel.coordinator

        def server_learns() -> None:
            if node.channel is channel:
                node.channel = None
                self.ranks.news(channel.server)

        def coordinator_learns() -> None:
            if coordinator.channels.get(channel.server) is channel:
                del coordinator.channels[channel.server]
                self._dial(coordinator, channel.server, again=True)

        def learn(process: Process, action: Callable[[], None]) -> None:
            if self._settings.elects:
                self._unless_cut(channel, lambda: process.run(action))
            else:
                process.run(action)

        self._deliver(channel, "down", lambda: learn(node.process, server_learns))
        self._deliver(channel, "up", lambda: learn(coordinator.process, coordinator_learns))

    def call(self, coordinator: SimulatedCoordinator, server: int) -> None:
        """A coordinator has learned where another incarnation of a server is reached."""
        if self._settings.elects:
            self._dial(coordinator, server)

    def _dial(self, coordinator: SimulatedCoordinator, server: int, again: bool = False) -> None:
        """Call a server; it takes a round trip to be there `again` after a connection broke."""
        node = self._servers[server]
        round_s = (
            2 * (self._delays.control.get(server, 0.0) + self._chance.uniform(*_HOP_S)) if again else 0.0
        )

        def attempt() -> None:
            if not coordinator.lives or server in coordinator.channels or self._servers[server] is not node:
                return
            if self._settings.elects and coordinator.numbers.get(server, 0) < _number(node):
                self._say(coordinator, coord.Gone(server, "its process is gone"))  # that of the one before
                return
            is_cut = self._is_cut(coordinator, server)
            if node.process.answers and coordinator.process.answers and not is_cut:
                self._connect(coordinator, server)
                return
            since = coordinator.failing_since.setdefault(server, coordinator.now)
            if not node.process.alive and not is_cut:
                self._say(coordinator, coord.Gone(server, "its process is gone"))
                return
            for_s = coordinator.now - since
            self._say(coordinator, coord.Unreached(server, "cannot be reached", for_s))
            self.network.after(_REDIAL_S, attempt)  # it may come back, and must learn that it is out

        self.network.after(round_s + self.network.random.uniform(0.0002, 0.003), attempt)

    def _connect(self, coordinator: SimulatedCoordinator, server: int) -> None:
        node = self._servers[server]
        coordinator.failing_since.pop(server, None)
        if node.channel is not None:
            # A newer connection replaces the older one, mostly behind the server's messages there.
            self._break(node.channel, *_WAYS[: self._chance.choice((1, 1, 2))])
        channel = node.channel = Channel(coordinator, server)

        def opened() -> None:
            coordinator.channels[server] = channel
            coordinator.handle(coord.Connected(server))

        self._deliver(channel, "up", lambda: coordinator.process.run(opened))
