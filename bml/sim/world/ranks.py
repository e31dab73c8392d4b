"""The ranks of a job without a launcher: they elect who runs the coordinator, as those of `bml.cluster` do.

Their decisions are `bml.protocol.coordinator.election`. Each rank has a process for coordinators beside its
own, as bml.cluster.formation.coordinator_process has: it dies with the rank, goes on while the rank is
stopped, and is killed by the rank when it is silent for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from bml.protocol.coordinator.election import CoordinatorElection, GiveUp, Prepare, Probe, Seen, Start
from bml.protocol.server.core import ServerCore
from bml.protocol.server.events import Alone, Event
from bml.protocol.timeouts import Timeouts
from bml.sim.world.load import Load
from bml.sim.world.network import Network
from bml.sim.world.process import Process
from bml.sim.world.settings import Settings

_ALIVE_EVERY_S, _SILENT_TURNS = 0.25, 12
"""As bml.cluster.formation: how often the process gives a sign of life, and how many may be missing."""
_JOINERS_EVERY_S = 0.2  # as bml.cluster.formation.monitor
_DIES_S, _CLOSES_S, _LAST_WORDS_S = 0.01, 0.3, 3.0
"""So many seconds, at most, after a rank its process for coordinators is gone; a program takes to end after
an error; a coordinator takes to tell the others that the job is over."""


class Voter(Protocol):
    """A server as its rank's monitor sees it."""

    process: Process
    core: ServerCore
    over: bool
    n_told: int

    @property
    def is_led(self) -> bool:
        """Whether the line to a coordinator is open."""

    def handle(self, event: Event) -> None:
        """Let the core react."""


class Coordinator(Protocol):
    """A coordinator as the rank that started it sees it."""

    term: int
    process: Process

    def end(self) -> None:
        """Its loop ends: its connections are closed."""

    def meet(self, server: int, number: int) -> None:
        """Learn where this incarnation of a server is reached."""


class Rank:
    """One incarnation of a server: its monitor, and its process for coordinators."""

    def __init__(self, ranks: Ranks, server: int, voter: Voter, joins: bool):
        self.spare: Process | None = None
        """The process for coordinators, while the rank has one."""
        self.coordinators: list[Coordinator] = []
        """Those that run, or ran, in that process."""
        self.election = CoordinatorElection(
            server, len(ranks.machines), ranks.timeouts, ranks.network.now, joins, ranks.machines
        )
        self._ranks, self._server, self._voter = ranks, server, voter
        self._wake_at = float("inf")
        self._watched_term = 0
        self.look()

    def soon(self, action: Callable[[], None]) -> None:
        """Do something in the monitor's thread, while the rank's process runs."""
        self._ranks.network.after(0.0, lambda: self._voter.process.run(action))

    def look(self) -> None:
        """Carry out what the election says."""
        voter, now = self._voter, self._now
        if voter.over or not voter.process.alive:
            return
        core, view = voter.core, voter.core.view
        members = None if view is None else view.members
        term, suspected = core.coordinator_term, core.suspected_peers
        seen = Seen(term, voter.is_led, voter.n_told, members, suspected, core.unanswered)
        self.election.saw(seen, now)
        while (order := self.election.look(now)) is not None:
            match order:
                case Prepare():
                    self._prepare()
                case Start(term):
                    self._start(term)
                case Probe():
                    self._probe()
                case GiveUp():
                    self._voter.handle(Alone())
        if self.election.leads and self._watched_term != self.election.own_term:
            self._watched_term = self.election.own_term
            self._watch(self._watched_term, {})
        self._schedule(self.election.next_deadline(now))

    def _probe(self) -> None:
        others = (each for each in self._ranks.voters if each != self._server)
        somebody = not all(self._ranks.refuses(self._server, each) for each in others)
        self.soon(lambda: self.election.probed(somebody, self._now))

    def close(self, within_s: float) -> None:
        """The rank is gone, or its program ends: so does the process for coordinators, a little later."""
        spare, network = self.spare, self._ranks.network
        network.after(network.random.uniform(0, within_s), lambda: self._die(spare))

    def lose(self) -> None:
        """The process for coordinators dies, which the rank notices."""
        spare = self.spare
        if spare is not None and spare.alive:
            self._die(spare)
            self.soon(lambda: self._lost(spare))

    def freeze_spare(self) -> None:
        """The process for coordinators is stopped; the rank notices its silence, while it runs itself."""
        spare = self.spare
        if spare is not None and spare.runs:
            spare.freeze()
            self._listen(spare, 0)

    def ended(self, term: int, deposed_by: int) -> None:
        """The coordinator of this term has ended by itself, or was deposed by another one."""

        def hear() -> None:
            self.election.ended(term, self._now, deposed_by)
            self.look()

        self.soon(hear)

    @property
    def _now(self) -> float:
        """The time on the rank's clock."""
        return self._ranks.network.now - self._voter.process.behind_s

    # --- the process for coordinators ------------------------------------------------------------

    def _prepare(self) -> None:
        network, spare = self._ranks.network, Process()
        spare.behind_s = self._voter.process.behind_s
        self.spare, self.coordinators = spare, []
        self._ranks.load.add(spare)

        def ready() -> None:
            if spare is self.spare:
                self.election.ready()
                self.look()

        imports_s = self._ranks.restart_s * network.random.uniform(0.5, 1.5)
        network.after(imports_s, lambda: spare.run(lambda: self.soon(ready)))

    def _start(self, term: int) -> None:
        spare = self.spare
        assert spare is not None

        def begin() -> None:
            if self._ranks.crashes > 0:
                self._ranks.crashes -= 1
                self._ranks.on_event("fault", f"coordinator {term} crashes on its start")
                self.lose()
            else:
                self.coordinators.append(self._ranks.begin(term, self._server, spare))

        self._ranks.network.deliver((self, "spare"), lambda: spare.run(begin))

    def _listen(self, spare: Process, silent: int) -> None:
        if not spare.frozen or spare is not self.spare or not self._voter.process.alive:
            return
        silent += self._voter.process.runs
        if silent < _SILENT_TURNS:
            self._ranks.network.after(_ALIVE_EVERY_S, lambda: self._listen(spare, silent))
        else:
            self._ranks.on_event("kill", f"rank {self._server} kills its silent process for coordinators")
            self.lose()

    def _lost(self, spare: Process) -> None:
        if spare is self.spare:
            self.spare = None
            self.election.lost(self._now)
            self.look()

    def _die(self, spare: Process | None) -> None:
        if spare is not None and spare.alive:
            spare.die()
            for coordinator in self.coordinators:
                coordinator.end()

    # --- the store -------------------------------------------------------------------------------

    def _watch(self, term: int, known: dict[int, int]) -> None:
        """Ask the store for joiners, while the coordinator is this rank's."""
        ranks, election = self._ranks, self.election
        if self._voter.over or election.own_term != term or not election.leads:
            return
        newest = self.coordinators[-1] if self.coordinators else None
        if newest is not None and newest.term == term and ranks.network.now >= ranks.stalled_until_s:
            for server, number in ranks.joined.items():
                if known.get(server) != number:
                    known[server] = number
                    newest.meet(server, number)
        again = lambda: self._voter.process.run(lambda: self._watch(term, known))  # noqa: E731
        ranks.network.after(_JOINERS_EVERY_S, again)

    def _schedule(self, due: float) -> None:
        if due < self._wake_at:
            self._wake_at = due
            at_s = self._voter.process.when_s(due)
            self._ranks.network.at(at_s, lambda: self._voter.process.run(lambda: self._wake(due)))

    def _wake(self, due: float) -> None:
        if due == self._wake_at:
            self._wake_at = float("inf")
            self.look()


class Ranks:
    """The ranks of one job; `begin(term, rank, process)` makes a coordinator in a process.

    `refuses(a, b)`: whether the machine of rank b tells rank a that the process of b is gone.
    """

    def __init__(
        self,
        network: Network,
        timeouts: Timeouts,
        settings: Settings,
        voters: Mapping[int, Voter],
        load: Load,
        begin: Callable[[int, int, Process], Coordinator],
        refuses: Callable[[int, int], bool],
        on_event: Callable[[str, str], None],
    ):
        self.network, self.timeouts, self.restart_s = network, timeouts, settings.restart_s
        self.voters, self.load = voters, load
        self.machines = ["" if settings.shared_memory else str(rank) for rank in voters]
        """That of each rank, by name."""
        self.begin, self.refuses, self.on_event = begin, refuses, on_event
        self.crashes = 0
        """How many coordinators are still to crash on their start."""
        self.stalled_until_s = 0.0
        """Until then the store answers nobody."""
        self.joined: dict[int, int] = {}
        """What the store has: server -> the newest incarnation that wants to join."""
        self._ranks: dict[int, Rank] = {}

    def came(self, server: int, number: int) -> None:
        """The process of a rank begins to run, in this incarnation."""
        if number:
            self.joined[server] = number
        self._ranks[server] = Rank(self, server, self.voters[server], joins=number > 0)

    def gone(self, server: int) -> None:
        """The process of a rank is gone: the kernel closes its sockets."""
        self._close(server, _DIES_S)

    def left(self, server: int, is_done: bool) -> None:
        """The job is over for a rank, well or with an error, after which its program ends."""
        self._close(server, _LAST_WORDS_S if is_done else _CLOSES_S)

    def news(self, server: int) -> None:
        """Something has happened on the line of a rank to its coordinator."""
        if server in self._ranks:
            self._ranks[server].soon(self._ranks[server].look)

    def ended(self, server: int, term: int, deposed_by: int) -> None:
        """The coordinator that a rank started has ended by itself, or was deposed by another one."""
        self._ranks[server].ended(term, deposed_by)

    def lose_spare(self, server: int) -> None:
        """The process for coordinators of a rank dies."""
        if server in self._ranks:
            self._ranks[server].lose()

    def freeze_spare(self, server: int) -> Process | None:
        """It is stopped; returns it, if the rank has one that runs."""
        rank = self._ranks.get(server)
        if rank is None or rank.spare is None or not rank.spare.runs:
            return None
        rank.freeze_spare()
        return rank.spare

    def _close(self, server: int, within_s: float) -> None:
        if server in self._ranks:
            self._ranks[server].close(within_s)
