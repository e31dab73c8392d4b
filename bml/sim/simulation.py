"""N server cores and coordinators on a virtual clock, with real arithmetic, real schedules and mishaps.

Everything follows from the seed. Every simulated user sums vectors over its share of a fixed global batch,
so the right result of every step is known whatever fails, and every event is checked against the promises
at once. A server that was lost can be started again, as its next incarnation. One that was absent can come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from bml.protocol.coordinator import core as coord
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.sim.judge.history import History
from bml.sim.judge.promises import PromiseBroken, Promises
from bml.sim.mishaps.affected import Affected
from bml.sim.mishaps.chaos import FOREVER, Mishap
from bml.sim.mishaps.endings import OPERATOR_S, Endings
from bml.sim.mishaps.slow import delay_s_of, falls_of, nics_of, ports_of, share_of
from bml.sim.mishaps.troubles import Troubles
from bml.sim.server.machine import Machine
from bml.sim.world.coordinators import SimulatedCoordinator, SimulatedCoordinators
from bml.sim.world.host import Host
from bml.sim.world.load import Load
from bml.sim.world.network import Network
from bml.sim.world.paths import Key, Pair, Where, pair
from bml.sim.world.ports import Ports
from bml.sim.world.settings import Settings
from bml.sim.world.wires import Wires
from bml.topology import Fabric

#: How long the steps of a run may take on a host that is overloaded, or over slow NICs, in virtual seconds.
_LOADED_S = 400.0
#: After so many failing starts a launcher may give up, with the other mishaps of coordinators.
_MANY_STARTS = 6
_CLOSES_S, _DEPARTS_S = 0.3, 0.5
"""How long a program takes to end after an error, at most; how long it waits before for a view without it."""
_WAYS = 12
"""So often slow ways are gone in a step, one after the other, at most."""

_MOST_EVENTS = 100_000
"""A run that goes round in circles is over then; honest ones take less than a fifth of it."""
_USUAL_SERVERS = 9
"""More servers have so many times as many events."""

_OF_LEADER = "leader-"
"""A mishap with this before its name befalls the rank beside which the coordinator runs."""

_DEFAULTS = Settings()


class Simulation:
    """A job on `fabric`, and the `mishaps` that befall it; all of it follows from `seed`.

    `run` returns the history. It raises PromiseBroken as soon as a promise is broken, and when the run has
    not ended by its deadline (virtual seconds). `recorded`: the history has a timeline for readers, too.
    """

    def __init__(
        self,
        fabric: Fabric,
        seed: int,
        settings: Settings = _DEFAULTS,
        mishaps: Iterable[Mishap] = (),
        recorded: bool = True,
    ):
        self.fabric, self.settings = fabric, settings
        self.first = tuple(server for server in fabric.servers if server not in settings.absent)
        self.timeouts = Timeouts.of(settings.detect_s)
        self.network = Network(seed, settings.delay_s)
        self.history = History(recorded)
        self.promises = Promises(self.history, self._reachable, self._slowed)
        self.endings = Endings()
        self.finished: coord.Finished | None = None
        self.gave_up = ""
        """Why the launcher ended the job, if it could not get a coordinator."""
        self._load = Load(self.network, settings.load_s, seed)
        self._deadline_s = _LOADED_S if settings.load_s or settings.rate_nbytes_s else 0.0
        self._headless = False
        least = fabric.n_servers // 2 + 1 if settings.min_servers is None else settings.min_servers
        self.affected = Affected(fabric, least)
        self.affected.servers.update(settings.absent)
        self.affected.resized = bool(settings.absent)
        self._troubles = Troubles(fabric)
        self._tied: defaultdict[tuple[str, int], list[Mishap]] = defaultdict(list)
        self.wires = Wires(
            Ports(self.network, settings.rate_nbytes_s, seed),
            self.timeouts.connect_s,
            process=lambda server: self.machines[server].process,
            arrived=lambda to, origin, level: self.machines[to].arrived(origin, level),
            lost=lambda server, peer, level, why: self.machines[server].lost(peer, level, why),
            heard=lambda to, *heartbeat: self.machines[to].heard(*heartbeat),
            proved=lambda to, origin, level: self.machines[to].proved(origin, level),
            delays=settings.delays,
        )
        self.host = Host() if settings.shared_memory else None
        #: Slices are read in their senders' memory, so those that are fenced meanwhile never arrive.
        self.zero_copy = seed % 2 == 0
        self.machines = {server: Machine(server, self) for server in fabric.servers}
        for server in settings.absent:
            self.machines[server].process.die()
        self.coordinators = SimulatedCoordinators(
            fabric, self.network, self.timeouts, settings, self.machines, self._load, self
        )
        for mishap in mishaps:
            self.plan(mishap)

    # --- mishaps ---------------------------------------------------------------------------------

    def plan(self, mishap: Mishap) -> None:
        """Apply a mishap when its time comes, or its event."""
        self._headless |= mishap.kind == "launcher-freeze" and mishap.for_s == FOREVER
        if mishap.when.point:
            self._tied[mishap.when.point, mishap.when.nth].append(mishap)
        else:
            self.network.at(mishap.when.after_s, partial(self.apply_mishap, mishap))

    def apply_mishap(self, mishap: Mishap) -> None:
        """Apply a mishap now."""
        if all(machine.over for machine in self.machines.values()):
            return
        mishap = self._of_leader(mishap)
        self.point("fault", f"*** {mishap}")
        self._troubles.note(mishap, self.network.now)
        target = mishap.target
        match mishap.kind:
            case "crash":
                self._crash(target[0])
            case "machine-freeze" | "machine-pause" as kind:
                self._stop_machine(target[0], mishap.for_s, kind == "machine-pause")
            case "freeze" | "gil" as kind:
                self._freeze(target[0], mishap.for_s, kind)
            case "silent" | "deaf" | "mute":
                self._block(mishap.kind, [(target[0], target[1])], mishap.for_s)
            case "switch":
                level, group = target
                nics = [(server, level) for server in self.fabric.members(level, group)]
                self._block("silent", nics, mishap.for_s)
            case "stall" | "unheard" | "lossy":
                self._block_pair(mishap.kind, pair(*target), mishap.for_s)
            case "partition":
                self._part(frozenset(target), mishap.for_s)
            case "isolate":
                self._hold(target[0], mishap.for_s)
                self._part(frozenset(target), mishap.for_s)
            case "reset":
                self.affected.servers.update(target[:2])
                self.affected.n_network += 1
                self.wires.reset(*target)
            case "control-loss":
                self.coordinators.lose(target[0])
            case "control-hold":
                self._hold(target[0], mishap.for_s)
            case "control-pair":
                self._hold_pair(target[0], target[1], mishap.for_s)
            case "degrade":
                for step in falls_of(mishap, self.network.now):
                    self.plan(step)
            case "busy":
                self._make_busy(mishap)
            case "slow" | "slow-out" | "slow-in" | "slow-switch" | "jitter":
                self._slow_down(mishap)
            case "join":
                self._join(target[0])
            case "raise" | "return" | "endless":
                machine = self.machines[target[0]]
                machine.process.run(partial(machine.user.end_as, mishap.kind))
            case "leave":
                self.affected.servers.add(target[0])
                self.affected.resized = True
                machine = self.machines[target[0]]
                machine.process.run(machine.leave)
            case kind:
                self.coordinators.apply_mishap(kind, mishap.for_s, *target)

    def _of_leader(self, mishap: Mishap) -> Mishap:
        """The same mishap with its target, if it befalls the rank beside which the coordinator runs."""
        if not mishap.kind.startswith(_OF_LEADER):
            return mishap
        leader = self.coordinators.leader
        of = self.first[0] if leader is None else leader
        return replace(mishap, kind=mishap.kind.removeprefix(_OF_LEADER), target=(of, *mishap.target))

    def _reachable(self, servers: Collection[int], view: msg.View) -> list[int]:
        """Those of these servers that run, and that every member of the view could reach."""
        running = {each for each in view.members if self.machines[each].process.answers}
        alive = (each for each in servers if running and self.machines[each].works)
        reached, connects = self._troubles.reached, self.wires.paths.connects
        lately = self._troubles.reachable(alive, {*view.members, *servers}, self.network.now)
        return [each for each in lately if running <= reached(each, running, connects)]

    def _slowed(self, server: int, level: int) -> bool:
        """Whether the NIC, or another one of its switch, has been slow."""
        return (level, self.fabric.group(server, level)) in self.affected.slow

    def _crash(self, server: int) -> None:
        machine = self.machines[server]
        if machine.process.alive:
            self.affected.servers.add(server)
            machine.process.die()
            self.wires.die(server)
            self.coordinators.gone(server, "process gone")

    def _join(self, server: int) -> None:
        """Start a server that is dead, or out, in another incarnation."""
        old = self.machines[server]
        ended = self.finished and not self.settings.elects  # the launcher starts no server then
        if ended or (old.process.alive and (old.done or not old.over)):
            return
        if old.process.alive:
            self._crash(server)
        self.affected.servers.add(server)
        self.affected.resized = True
        number = old.incarnation.number + 1 if old.incarnation else 1
        machine = self.machines[server] = Machine(server, self, msg.Incarnation(server, number))
        self.history.commits = {
            step: {other: what for other, what in by.items() if other != server}
            for step, by in self.history.commits.items()
        }
        self._start(machine)

    def _start(self, machine: Machine) -> None:
        self._load.add(machine.process)
        machine.start()
        self.coordinators.came(machine.server)

    def _freeze(self, server: int, for_s: float, kind: str) -> None:
        machine = self.machines[server]
        if machine.process.runs:
            if kind == "gil":
                machine.stand_in()
            if kind == "freeze" or for_s > machine.awaited_s:
                self.affected.servers.add(server)
            machine.process.freeze(for_good=for_s == FOREVER)
            self._later(for_s, machine.process.thaw, f"server {server} thaws")

    def _stop_machine(self, server: int, for_s: float, clock_stands: bool) -> None:
        """A machine is stopped, with all that runs on it; it may not notice that time has passed."""
        behind_s = for_s if clock_stands and for_s != FOREVER else 0.0
        self.coordinators.freeze_beside(server, for_s, behind_s)
        if self.machines[server].process.runs:
            self.machines[server].process.behind_s += behind_s
        self._freeze(server, for_s, "freeze")

    def _block(self, kind: str, nics: list[Key], for_s: float) -> None:
        self.affected.servers.update(server for server, _ in nics)
        self._obstruct(kind, nics, for_s)

    def _block_pair(self, kind: str, between: Pair, for_s: float) -> None:
        self.affected.pairs.add(between)
        self._obstruct(kind, [between], for_s)

    def _part(self, part: frozenset[int], for_s: float) -> None:
        other = frozenset(self.fabric.servers) - part
        self.affected.servers.update(part if len(part) < len(other) else part | other)
        self.affected.n_network += 1
        self._obstruct("parted", [part], for_s)

    def _obstruct(self, kind: str, places: Sequence[Where], for_s: float) -> None:
        self.affected.n_network += 1
        for where in places:
            self.wires.paths.block(kind, where)

        def heal() -> None:
            for where in places:
                self.wires.heal(kind, where)

        self._later(for_s, heal, f"{kind} {', '.join(map(str, places))} heals")

    def _slow_down(self, mishap: Mishap) -> None:
        """A part is slow: that befalls no server."""
        self.affected.slow.update(
            (level, self.fabric.group(server, level)) for server, level in nics_of(mishap, self.fabric)
        )
        ports, held = self.wires.ports, ports_of(mishap, self.fabric)
        is_late = mishap.kind == "jitter"
        end = ports.hold_up(held, delay_s_of(mishap)) if is_late else ports.slow_down(held, share_of(mishap))
        self._later(mishap.for_s, end, f"{mishap.kind} heals")

    def _make_busy(self, mishap: Mishap) -> None:
        """A training function computes slowly: that befalls no server."""
        user, factor = self.machines[mishap.target[0]].user, 1 / share_of(mishap)
        user.slower *= factor

        def recover() -> None:
            user.slower /= factor

        self._later(mishap.for_s, recover, f"{mishap.kind} heals")

    def _hold(self, server: int, for_s: float) -> None:
        self.affected.servers.add(server)
        self.coordinators.hold(server)
        text = f"the control connection of server {server} heals"
        self._later(for_s, lambda: self.coordinators.release(server), text)

    def _hold_pair(self, a: int, b: int, for_s: float) -> None:
        self.affected.servers.update((a, b))
        pair = frozenset((a, b))
        self.coordinators.hold_pair(pair)
        text = f"the control network between servers {a} and {b} heals"
        self._later(for_s, lambda: self.coordinators.release_pair(pair), text)

    def _later(self, after_s: float, action: Callable[[], None], text: str) -> None:
        def act() -> None:
            self.point("heal", f"*** {text}")
            action()

        if after_s != FOREVER:
            self.network.after(after_s, act)

    # --- the run ---------------------------------------------------------------------------------

    def run(self, deadline_s: float = 75.0) -> History:
        """Run to the end of the job; see the class.

        Where the launcher stops for good, servers may have to wait for a coordinator until they give up; only
        then may their neighbours need one, and so on.
        """
        slow_s = _WAYS * self.settings.delays.longest_s * self.settings.steps
        deadline_s = max(deadline_s, self._deadline_s, slow_s)
        if self.settings.elects:
            deadline_s += self.timeouts.orphan_s  # those that are done ask only now and then
        if self._headless:
            servers = self.fabric.servers
            hops = max(len(self.fabric.route(a, b)) for a in servers for b in servers)
            deadline_s += (1 + hops) * (self.timeouts.orphan_s + self.timeouts.warm_up_s)
        self.coordinators.start()
        for server in self.first:
            self._start(self.machines[server])
        most_events = _MOST_EVENTS * max(1.0, deadline_s / 150)  # half of it are heartbeats
        most_events *= max(1.0, self.fabric.n_servers / _USUAL_SERVERS)
        if not self.network.run(self._all_over, deadline_s, most_events):
            waits = [f"server {server}: {each.waits_for()}" for server, each in self.machines.items()]
            waits += [f"coordinator {each.term}: {each.text}" for each in self.coordinators.started]
            raise PromiseBroken(4, "\n".join(["the run did not end", *waits]))
        self._check_end()
        return self.history

    def _all_over(self) -> bool:
        return all(machine.over or machine.process.stopped for machine in self.machines.values())

    def _check_end(self) -> None:
        done = [server for server, machine in self.machines.items() if machine.done]
        self.promises.ended(
            self.settings.steps, {server: self.machines[server].first_step for server in done}
        )
        self.promises.ledgers({server: self.machines[server].ledger.summary() for server in done})
        self.endings.check(self.history.errors)
        self.endings.check_bound(self.history.counts["fault"], self.network.now)
        if self.affected.n_network < 2:
            self._check_blame()

    def _check_blame(self) -> None:
        """Check that no server is lost, and no job given up, for mishaps of others."""
        abort = self.finished.abort if self.finished else None
        if abort is not None and abort.kind == "start" and (self.affected.servers or self.affected.pairs):
            return
        if self.gave_up and self.coordinators.failing_starts < _MANY_STARTS:
            raise PromiseBroken(4, f"the launcher gave up ({self.gave_up}) though coordinators could start")
        if self.gave_up or self._headless:
            return
        if abort is not None and self.affected.resized:
            return  # the majority was one of fewer servers than there are
        main = self.affected.unaffected()
        errors = self.history.errors
        self.endings.check_told(main, errors)
        lost = [
            server
            for server in main
            if not self.machines[server].user.satisfied and not self.endings.excuse(errors.get(server))
        ]
        if lost and abort is not None:
            raise PromiseBroken(4, f"the job ended ({abort.text}) though servers {main} were whole")
        if lost:
            raise PromiseBroken(2, f"servers {lost} were lost though nothing befell them")

    # --- called by the parts ---------------------------------------------------------------------

    def point(self, name: str, text: str, server: int | None = None) -> None:
        """Something happened (at a server): log it, and apply the mishaps that are tied to it."""
        self.history.log(self.network.now, text)
        self.history.counts[name] += 1
        nth = self.history.counts[name]
        for planned in self._tied.pop((name, nth), ()):
            here = not planned.target and planned.kind in ("crash", "freeze", "control-hold")
            mishap = replace(planned, target=(server,)) if here and server is not None else planned
            if mishap.when.after_s:
                self.network.after(mishap.when.after_s, partial(self.apply_mishap, mishap))
            else:
                self.apply_mishap(mishap)

    def function_ends(self, server: int, how: str, said: str) -> None:
        """See `World`; an operator kills a server that computes without end, once the job stands still."""
        self.point("turned", f"the training function of server {server} ends: {how} {said}", server)
        machine = self.machines[server]
        if how == "raise":
            self.endings.raised(server, said, self.network.now)
        elif how == "return":
            self.endings.returned(server, machine.core.committed, self.network.now)
        elif how == "depart":
            self.affected.servers.add(server)
            self.affected.resized = True
            self.network.after(_DEPARTS_S, partial(machine.process.run, machine.go))
        else:
            self.network.after(OPERATOR_S, partial(self._operate, server, machine))

    def _operate(self, server: int, machine: Machine) -> None:
        if machine is self.machines[server] and not machine.over:
            what = f"kills server {server}, which waits for {machine.waits_for()}"
            self.point("fault", f"*** an operator {what}")
            self._crash(server)

    def left(self, server: int, is_done: bool) -> None:
        """See `World`."""
        self.coordinators.left(server, is_done)
        if self.settings.elects and not is_done:  # its program ends, too
            self.network.after(self.network.random.uniform(0, _CLOSES_S), self.machines[server].end)

    def tell(self, server: int, message: msg.ToCoordinator) -> None:
        """A server's message to its coordinator."""
        self.coordinators.tell(server, message)

    def give_up(self, why: str) -> None:
        """See `Job`."""
        self.point("finished", f"the launcher ends the job: {why}")
        self.gave_up = why
        for machine in self.machines.values():
            machine.process.die()

    def finish(self, coordinator: SimulatedCoordinator, finished: coord.Finished) -> None:
        """See `Job`."""
        if finished.deposed_by:
            self.point("deposed", f"coordinator {coordinator.term} learns that it is not the coordinator")
            coordinator.end()
        elif coordinator is self.coordinators.newest or self.settings.elects:
            how = finished.abort.text if finished.abort else "all are done"
            self.point("finished", f"coordinator {coordinator.term} ends the job: {how}")
            # Of two coordinators one may see that it is cut off from most, and end the job for itself.
            if self.finished is None or (self.finished.abort and self.finished.abort.kind != "start"):
                self.finished = finished
