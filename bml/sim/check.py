"""Checks the protocol against its promises, seed by seed; a seed that breaks one replays and shrinks."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bml.protocol.server.learner import KEPT_NBYTES
from bml.protocol.timeouts import Timeouts
from bml.schedule.select.model import DEFAULTS
from bml.sim.judge.history import History
from bml.sim.judge.promises import PromiseBroken
from bml.sim.mishaps.chaos import (
    Mishaps,
    draw,
    draw_absent,
    draw_busy,
    draw_elections,
    draw_joins,
    draw_late_views,
    draw_paths,
    draw_sharing,
    draw_successions,
)
from bml.sim.mishaps.endings import draw_ending
from bml.sim.mishaps.held import draw_held
from bml.sim.mishaps.many import draw_many
from bml.sim.mishaps.slow import draw_slow
from bml.sim.mishaps.strangers import draw_strangers
from bml.sim.simulation import Simulation
from bml.sim.world.delays import MOST_S, NONE, draw_delays
from bml.sim.world.settings import TREES, Settings
from bml.topology import parse

#: Small fabrics find most bugs, and fast; each is drawn about as often as it stands here.
FABRICS = ("bcube:2x2", "bcube:2x2", "bcube:3x1", "bcube:4x1", "bcube:3x2", "bcube:2x3")
OTHER_FAMILIES = ("torus:3x1", "torus:4x1", "torus:3x2", "switch:3", "switch:5", "fattree:4/4")
#: On one host, few servers add whole vectors: so more are drawn, of which some may be lost.
HOSTS = ("bcube:2x2", "bcube:4x1", "bcube:5x1", "bcube:2x3", "bcube:3x2")
#: Large vectors take many events.
SLOW_FABRICS = ("bcube:2x2", "bcube:2x2", "bcube:3x1", "bcube:4x1", "switch:3", "torus:3x1", "bcube:3x2")
DETECT_S = 0.5  # that of a job
#: Every so many seeds, servers join; those runs take several times as long.
JOINS_EVERY = 4
#: In one of so many of the others it is coordinators and their launcher that fail.
SUCCESSIONS_EVERY = 5
#: In one of so many seeds no launcher but the ranks start coordinators.
ELECTS_EVERY = 7
#: Every so many seeds a training function raises, returns early, or computes without end, beside all else.
ENDINGS_EVERY = 5
#: Every so many seeds, training functions hold the interpreter's lock, beside all else.
HELD_EVERY = 6
#: Every so many seeds, something passes on some path and something else does not.
PATHS_EVERY = 3
#: In one of so many of them the host is so busy that all react late.
BUSY_EVERY = 5
#: Fabrics of more servers are simulated with mishaps of single parts alone, and at the delays of one hall.
MOST_SERVERS = 64
_HALL_S = (50e-6, 150e-6)  # one way between machines of a hall
#: Every so many seeds, NICs carry a bounded number of bytes per second that wanders, and some are slow.
SLOW_EVERY = 20


@dataclass(frozen=True, kw_only=True)
class Scenario(Settings):
    """A run, which follows from all this: its seed, the fabric by name, the settings, and the mishaps."""

    seed: int
    fabric: str
    mishaps: Mishaps = ()

    @classmethod
    def of(cls, seed: int, fabric: str | None = None, shared_memory: bool = False) -> Scenario:
        """The scenario that a seed stands for, on this fabric or one that the seed chooses."""
        chance, extra = random.Random(seed), random.Random(f"families {seed}")
        chosen = chance.choice(FABRICS)
        name = fabric or (extra.choice(OTHER_FAMILIES) if extra.random() < 0.3 else chosen)
        if parse(name).n_servers > MOST_SERVERS:
            return cls._large(seed, name, shared_memory)
        scenario = cls(
            seed=seed,
            fabric=name,
            steps=chance.choice((2, 3, 3, 4)),
            n_elements=chance.choice((0, 1, 5, 17, 30)),
            slice_nbytes=chance.choice((8, 64, 1024)),
            mishaps=draw(chance, parse(name), DETECT_S),
            # With start-up times such small vectors take an exchange where the fabric is healthy.
            constants=DEFAULTS if seed % 2 else TREES,
            shared_memory=shared_memory,
            min_servers=_min_servers(extra, parse(name).n_servers),
            delays=draw_delays(random.Random(f"delays {seed}"), parse(name)),
        )
        if seed % SLOW_EVERY == 7 and not shared_memory:
            return scenario._with_slow_parts(fabric)
        if seed % JOINS_EVERY == 0:
            scenario = scenario._with_joins()
        elif shared_memory and seed % JOINS_EVERY > 1:
            scenario = scenario._at_work(fabric)
        elif seed % SUCCESSIONS_EVERY == 3:
            scenario = scenario._with_successions()
        elif seed % BUSY_EVERY == 1:
            return scenario._on_a_busy_host()
        if seed % ELECTS_EVERY == 4 and not scenario.absent:
            scenario = scenario._with_elections()
        if seed % PATHS_EVERY == 1:
            scenario = scenario._with_paths()
        if seed % HELD_EVERY == 4:
            scenario = scenario._with_held_locks()
        return scenario._with_an_ending() if seed % ENDINGS_EVERY == 2 else scenario

    @classmethod
    def _large(cls, seed: int, fabric: str, shared_memory: bool) -> Scenario:
        """A short run of many servers."""
        chance = random.Random(f"large {seed}")
        return cls(
            seed=seed,
            fabric=fabric,
            steps=chance.choice((2, 3)),
            n_elements=chance.choice((5, 17, 30)),
            mishaps=draw_many(chance, parse(fabric), DETECT_S),
            shared_memory=shared_memory,
            delay_s=_HALL_S,
        )

    def _at_work(self, fabric: str | None) -> Scenario:
        """Instead: servers of one host that stop while they read memory that others write next."""
        chance = random.Random(f"at work {self.seed}")
        name = fabric or chance.choice(HOSTS)
        return replace(
            self,
            fabric=name,
            steps=chance.choice((3, 4, 6)),
            n_elements=chance.choice((5, 5, 17, 30, 30)),
            mishaps=draw_sharing(chance, parse(name), DETECT_S),
            min_servers=_min_servers(chance, parse(name).n_servers),
            delays=draw_delays(chance, parse(name)),
        )

    def _with_joins(self) -> Scenario:
        """Instead: a longer run in which servers join."""
        chance = random.Random(f"joins {self.seed}")
        fabric = parse(self.fabric)
        absent = draw_absent(chance, fabric)
        mishaps = draw_joins(chance, fabric, DETECT_S, absent)
        delays = self.delays
        if chance.random() < 0.5:
            coming = [mishap.target[0] for mishap in mishaps if mishap.kind == "join"]
            delays = delays.between(coming, fabric, chance.uniform(0.01, MOST_S))
        late = random.Random(f"late views {self.seed}")
        steps, per_iteration = chance.choice((12, 25, 40)), late.choice((1, 1, 2, 3))
        if late.random() < 0.4:
            mishaps = (*mishaps, *draw_late_views(late, DETECT_S))
            steps, per_iteration = 60, late.choice((2, 3, 4))
        foreign = random.Random(f"foreign {self.seed}")
        if foreign.random() < 0.6:
            lost = draw_strangers(foreign, fabric, absent)
            first = {*fabric.servers} - {*absent} if lost else ()
            mishaps, delays = (*mishaps, *lost), delays.far(first, foreign.choice((0.005, 0.03)))
        return replace(
            self,
            steps=steps,
            slice_nbytes=64,
            constants=chance.choice((DEFAULTS, TREES)),
            absent=absent,
            min_servers=None if absent else self.min_servers,
            mishaps=mishaps,
            delays=delays,
            kept_nbytes=chance.choice((KEPT_NBYTES, KEPT_NBYTES, 1, 400)),
            per_iteration=per_iteration,
        )

    def _with_successions(self) -> Scenario:
        """Instead: a run in which coordinators and their launcher fail."""
        chance = random.Random(f"successions {self.seed}")
        reaches = chance.random() < 0.7
        return replace(self, reaches=reaches, mishaps=draw_successions(chance, parse(self.fabric), DETECT_S))

    def _with_elections(self) -> Scenario:
        """Instead: a run without a launcher, in which the ranks beside coordinators fail."""
        chance = random.Random(f"elections {self.seed}")
        found = draw_elections(chance, parse(self.fabric), DETECT_S)
        beside = [each for each in self.mishaps if not each.kind.startswith(("launcher", "clock"))]
        return replace(self, elects=True, mishaps=(*(beside if chance.random() < 0.4 else ()), *found))

    def _with_paths(self) -> Scenario:
        """The same, and paths on which some traffic passes and some does not."""
        chance = random.Random(f"paths {self.seed}")
        found = draw_paths(chance, parse(self.fabric), DETECT_S, self.mishaps)
        return replace(self, mishaps=found)

    def _with_held_locks(self) -> Scenario:
        """Training functions hold the lock, now and then beside all else; past the first steps, too."""
        chance = random.Random(f"held {self.seed}")
        beside = self.mishaps if chance.random() < 0.3 else ()
        found = draw_held(chance, parse(self.fabric), Timeouts.of(DETECT_S), beside)
        return replace(self, steps=max(self.steps, 10), mishaps=(*beside, *found))

    def _with_an_ending(self) -> Scenario:
        """The same, and a training function that does not end as it should."""
        chance = random.Random(f"ending {self.seed}")
        return replace(
            self,
            mishaps=(*self.mishaps, draw_ending(chance, parse(self.fabric), len(self.mishaps))),
        )

    def _on_a_busy_host(self) -> Scenario:
        """Instead: a run on a host with too few cores, past its start."""
        chance = random.Random(f"busy {self.seed}")
        steps = chance.choice((5, 6, 8))
        return replace(
            self,
            steps=steps,
            load_s=chance.choice((0.3, 0.6, 1.0)),
            mishaps=draw_busy(chance, parse(self.fabric), DETECT_S, steps),
            delays=NONE,
        )

    def _with_slow_parts(self, fabric: str | None) -> Scenario:
        """Instead: a longer run of large vectors over NICs of which some are slow."""
        chance = random.Random(f"slow {self.seed}")
        name = fabric or chance.choice(SLOW_FABRICS)
        return replace(
            self,
            fabric=name,
            steps=chance.choice((16, 32)) if parse(name).n_servers < 8 else 12,
            n_elements=6000,
            slice_nbytes=2048,
            rate_nbytes_s=250e3,
            mishaps=draw_slow(chance, parse(name), DETECT_S),
            min_servers=_min_servers(chance, parse(name).n_servers),
            delays=NONE,
        )

    def simulation(self, recorded: bool = False) -> Simulation:
        """The run, ready to start."""
        return Simulation(parse(self.fabric), self.seed, self, self.mishaps, recorded)

    def __str__(self) -> str:
        what = f"{self.steps} steps of {self.n_elements} elements in slices of {self.slice_nbytes} bytes"
        what += "" if self.constants.alpha_s else " on trees"
        what += f", {self.per_iteration} in each iteration" if self.per_iteration > 1 else ""
        what += f", at least {self.min_servers} servers" if self.min_servers else ""
        what += f", on a busy host ({self.load_s:g} s)" if self.load_s else ""
        what += f", NICs carry {self.rate_nbytes_s / 1e3:g} kB/s" if self.rate_nbytes_s else ""
        what += ", ranks elect the coordinator" if self.elects else ""
        what += "" if self.reaches else ", no coordinator can be killed"
        mishaps = "; ".join([*(f"server {each} absent" for each in self.absent), *map(str, self.mishaps)])
        mishaps = mishaps or "no mishap"
        mishaps += f"; joiners keep {self.kept_nbytes} bytes" if self.kept_nbytes != KEPT_NBYTES else ""
        mishaps += f"; slow: {self.delays}" if self.delays else ""
        return f"seed {self.seed} on {self.fabric}: {what}; {mishaps}"


def _min_servers(chance: random.Random, n_servers: int) -> int | None:
    """How many servers must be left: as a rule the default, else some number from the majority up.

    Fewer than the majority gives up the promise that two halves never both go on; see
    docs/explanation/protocol.md.
    """
    return chance.randint(n_servers // 2 + 1, n_servers) if chance.random() < 0.25 else None


@dataclass(frozen=True)
class Outcome:
    """The end of a run: `broken` is the promise that does not hold, None if all hold."""

    broken: PromiseBroken | None
    history: History
    mishaps: int
    aborted: bool


def run(scenario: Scenario, recorded: bool = False) -> Outcome:
    """Run once. An error in the protocol's own code breaks promise 0."""
    simulation = scenario.simulation(recorded)
    broken: PromiseBroken | None = None
    try:
        simulation.run()
    except PromiseBroken as error:
        broken = error
    except Exception as error:  # whatever it is, it would have ended a server's loop
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
        broken = PromiseBroken(0, f"{type(error).__name__} in {where}: {error}")
    counts, finished = simulation.history.counts, simulation.finished
    return Outcome(
        broken, simulation.history, counts["fault"], finished is not None and finished.abort is not None
    )


def shrink(scenario: Scenario, most_runs: int = 200) -> Scenario:
    """A scenario that still breaks a promise, with as few mishaps and steps as can be found.

    Without slow ways if that will do; mishaps are left out one by one, until none can be missed; then steps.
    """
    runs = 0

    def breaks(candidate: Scenario) -> bool:
        nonlocal runs
        runs += 1
        return runs <= most_runs and run(candidate).broken is not None

    if breaks(replace(scenario, delays=NONE)):
        scenario = replace(scenario, delays=NONE)
    smaller = True
    while smaller:
        smaller = False
        for index in reversed(range(len(scenario.mishaps))):
            left = scenario.mishaps[:index] + scenario.mishaps[index + 1 :]
            if breaks(replace(scenario, mishaps=left)):
                scenario, smaller = replace(scenario, mishaps=left), True
    for steps in range(1, scenario.steps):
        if breaks(replace(scenario, steps=steps)):
            return replace(scenario, steps=steps)
    return scenario


@dataclass
class Tally:
    """The counts of many runs. `seconds` is left to the caller, which has a clock."""

    seeds: int = 0
    violations: int = 0
    failing_seed: int | None = None
    faults_injected: int = 0
    steps_committed: int = 0
    jobs_aborted: int = 0
    seconds: float = 0.0
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, seed: int, outcome: Outcome) -> None:
        """Count one run."""
        broken = None if outcome.broken is None else str(outcome.broken)
        self.count(seed, outcome.mishaps, len(outcome.history.commits), outcome.aborted, broken)

    def count(self, seed: int, faults: int, steps: int, aborted: bool, broken: str | None) -> None:
        """Count one run of so many faults and committed steps; `broken` is its violation, if there is one."""
        self.seeds += 1
        self.faults_injected += faults
        self.steps_committed += steps
        self.jobs_aborted += aborted
        if broken is not None:
            self._violation(seed, broken)

    def merge(self, other: Tally) -> None:
        """Add the counts of another process."""
        self.seeds += other.seeds
        self.faults_injected += other.faults_injected
        self.steps_committed += other.steps_committed
        self.jobs_aborted += other.jobs_aborted
        for seed, text in other.broken.items():
            self._violation(seed, text)

    def _violation(self, seed: int, text: str) -> None:
        self.violations += 1
        self.broken[seed] = text
        self.failing_seed = seed if self.failing_seed is None else min(seed, self.failing_seed)


def check(seeds: Iterable[int], fabric: str | None = None, shared_memory: bool = False) -> Tally:
    """Run every seed, and count."""
    tally = Tally()
    for seed in seeds:
        tally.add(seed, run(Scenario.of(seed, fabric, shared_memory)))
    return tally


def report(seed: int, fabric: str | None = None, shared_memory: bool = False) -> str:
    """The timeline of a seed's scenario, shrunk as far as it still breaks its promise."""
    found = shrink(Scenario.of(seed, fabric, shared_memory))
    outcome = run(found, recorded=True)
    return "\n".join([str(found), str(outcome.broken or "holds"), "", outcome.history.timeline()])


__all__ = ["FABRICS", "Outcome", "Scenario", "Tally", "check", "report", "run", "shrink"]
