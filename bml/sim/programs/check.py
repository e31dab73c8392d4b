"""Runs random programs with random faults, and compares every server with the oracle."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from bml.sim.check import Tally
from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Dead, Faults
from bml.sim.programs.flaws import BY_SERVER
from bml.sim.programs.group import Group
from bml.sim.programs.oracle import OracleSession
from bml.sim.programs.running import run
from bml.sim.programs.writer import Program, Writer
from bml.train.balancing.throughput import Counted

_FLAWED = 0.25
_MOST_CALLS = 40
_MOMENTS = ("before", "brought", "committed")
_OF_INTERRUPTED = ("Interrupted", "SessionBroken", "StepMismatch", "TrainingError", "UsageError")
"""Errors that servers may end with when a signal's handler raised on one of them, in a call or a loop."""


class CheckedProgram(NamedTuple):
    """The program of a seed, its faults, and the violations; no violation if all is right."""

    seed: int
    program: Program
    faults: Faults
    n_servers: int
    group: Group
    violations: tuple[str, ...]

    def __str__(self) -> str:
        said = "\n".join(f"  {each}" for each in self.violations or ("holds",))
        flaw = f" (it is flawed: {self.program.flaw})" if self.program.flaw else ""
        head = f"seed {self.seed}, {self.n_servers} servers: {self.faults}{flaw}"
        return f"{head}\n{said}\n\n{self.program.text}"


@dataclass
class Ends:
    """The ends of the servers' training functions; `failed`: the job ended with an error.

    `errors` are those that servers ended with, each with whether the server had joined.
    """

    values: dict[int, Any] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    ledgers: dict[int, Any] = field(default_factory=dict)
    counted: dict[int, list[Counted]] = field(default_factory=dict)
    errors: list[tuple[int, bool, BaseException]] = field(default_factory=list)
    failed: bool = False

    def note(
        self, communicator: ModelCommunicator, session: Any, value: Any, error: BaseException | None
    ) -> None:
        """A server's training function has ended; its thread says so."""
        if error is None:
            self.values[communicator.server] = value
            self.digests[communicator.server] = session.digest()
            self.ledgers[communicator.server] = session.samples()
            self.counted[communicator.server] = session.throughput.counted()
        elif not isinstance(error, Dead) and not isinstance(error.__cause__, Dead):
            self.errors.append((communicator.server, communicator.joins, error))


def check(seed: int) -> CheckedProgram:
    """Run the program of a seed among its faults."""
    chance = random.Random(f"programs {seed}")
    program = Writer(chance, chance.random() < _FLAWED).program()
    n_servers = chance.randint(2, 4)
    faults = random_faults(chance, n_servers)
    ends = Ends()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of states that differ at first: each program says whether they do
        os.environ["BML_DEBUG"] = "1" if program.flaw == "changed before it is committed" else "0"
        group = run(program.compiled(), range(n_servers), faults, ends.note)
    ends.failed = group.error is not None
    violations = [*group.violations, *judge(program, n_servers, ends, bool(faults.interrupts))]
    if set(chain(*faults.paces.values())) == {1.0} and any(group.shares.values()):
        violations.append(f"all servers are equally fast, their shares are not: {group.shares}")
    return CheckedProgram(seed, program, faults, n_servers, group, tuple(violations))


def check_all(seeds: Iterable[int]) -> Tally:
    """Run the programs of all these seeds, one after the other."""
    tally = Tally()
    for seed in seeds:
        found = check(seed)
        group, broken = found.group, "; ".join(found.violations) or None
        tally.count(seed, group.n_faults, group.committed, group.error is not None, broken)
    return tally


def random_faults(chance: random.Random, n_servers: int) -> Faults:
    """The faults of a job of two servers or more."""
    found = Faults(piece_nbytes=chance.choice([8, 16, 1 << 20]))
    servers = list(range(n_servers))
    if chance.random() < 0.25:
        found.absent = (chance.choice(servers),)
    for server in chance.sample(servers, chance.choice([0, 0, 1, 1, n_servers - 1])):
        if server not in found.absent:
            found.kills[server] = (
                chance.randint(1, _MOST_CALLS // 2),
                chance.choice(_MOMENTS),
            )
    if chance.random() < 0.1:
        found.leaves[chance.choice(servers)] = chance.randint(1, 10)
    for server in servers:
        found.paces[server] = tuple(chance.choice([1.0, 1.0, 2.0, 4.0]) for _ in range(chance.randint(1, 2)))
    for _ in range(chance.choice([0, 1, 1, 2])):
        server = chance.choice([*found.absent, *found.kills, *found.leaves, chance.choice(servers)])
        found.joins.append((chance.randint(1, _MOST_CALLS // 2), server))
        if chance.random() < 0.2:
            found.doomed[server] = (chance.randint(1, _MOST_CALLS // 2), chance.choice(_MOMENTS))
    if chance.random() < 0.1:
        found.interrupts[chance.choice(servers)] = int(10 ** chance.uniform(1, 4))
    found.batch_s = chance.choice([0.0, 6.0])
    found.holds_for_joiners = chance.random() < 0.5
    return found


def judge(program: Program, n_servers: int, ends: Ends, interrupted: bool = False) -> list[str]:
    """The violations in the end of a job. `interrupted`: a signal's handler raised on one of its servers."""
    found = []
    for server, joined, error in ends.errors:
        if not _may_raise(program, joined, interrupted, error):
            found.append(f"server {server} ended by {type(error).__name__}: {error}")
    if ends.failed or not ends.values:
        return found
    ledgers = {each and each["digest"] for each in ends.ledgers.values()}
    if len(set(ends.digests.values())) > 1 or len(ledgers) > 1:
        found.append(f"parameters or ledgers differ: {ends.digests} {ends.ledgers}")
    if len({tuple(each) for each in ends.counted.values()}) > 1:
        found.append(f"servers count other steps: {ends.counted}")
    if program.flaw in BY_SERVER:
        return found  # the right value of one server is wrong on another
    if not any(_equal(program, server, n_servers, ends) for server in range(n_servers)):
        found.append(f"other numbers than the oracle's: {ends.values} {ends.ledgers}")
    return found


def _may_raise(program: Program, joined: bool, interrupted: bool, error: BaseException) -> bool:
    """Whether the program, or the faults of the server, explain this error."""
    name = type(error).__name__
    if name in ("Evicted", "TooFewServers", *program.errors, *(_OF_INTERRUPTED if interrupted else ())):
        return True
    if program.flaw and name == "TrainingError":
        return True  # the error of the server that it names is judged there
    if joined and name == "UsageError" and program.between:
        return "joins a running job" in str(error)
    return False


def _equal(program: Program, server: int, n_servers: int, ends: Ends) -> bool:
    """Whether all servers have the oracle's values, if they began with the state of this server."""
    oracle = OracleSession(range(n_servers), server)
    with np.errstate():  # it may change how numpy treats errors
        expected = program.compiled()(oracle)
    for value in ends.values.values():
        if program.is_exact and not _same(value, expected):
            return False
    for ledger in ends.ledgers.values():
        rows = [
            (loop["loop"], loop["steps"], loop["left_out"], loop["end"])
            for loop in (ledger or {"loops": []})["loops"]
        ]
        if program.is_exact and rows != [loop.row() for loop in oracle.loops]:
            return False
    return True


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other))
