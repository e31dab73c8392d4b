"""Runs random programs with random faults, and compares every server with the oracle."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from bml.sim.check import Tally
from bml.sim.programs.company import Company, Dead, Faults, Line, run
from bml.sim.programs.oracle import OracleSession
from bml.sim.programs.writer import BY_SERVER, Program, Writer

_FLAWED = 0.25
_MOST_CALLS = 40


class Verdict(NamedTuple):
    """A seed's program, what befell it, and what it broke; nothing if all is right."""

    seed: int
    program: Program
    faults: Faults
    n_servers: int
    company: Company
    violations: tuple[str, ...]

    def __str__(self) -> str:
        said = "\n".join(f"  {each}" for each in self.violations or ("holds",))
        flaw = f" (it is flawed: {self.program.flaw})" if self.program.flaw else ""
        head = f"seed {self.seed}, {self.n_servers} servers: {self.faults}{flaw}"
        return f"{head}\n{said}\n\n{self.program.text}"


class _Ends:
    """What the servers' training functions came to, as their threads say."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[int, Any] = {}
        self.digests: dict[int, str] = {}
        self.ledgers: dict[int, Any] = {}
        self.errors: list[tuple[Line, BaseException]] = []

    def __call__(self, line: Line, outcome: tuple[Any, Any, BaseException | None]) -> None:
        session, value, error = outcome
        with self.lock:
            if error is None:
                self.values[line.server] = value
                self.digests[line.server] = session.digest()
                self.ledgers[line.server] = session.samples()
            elif not isinstance(error, Dead):
                self.errors.append((line, error))


def check(seed: int) -> Verdict:
    """Run the program of a seed among its faults."""
    chance = random.Random(f"programs {seed}")
    program = Writer(chance, chance.random() < _FLAWED).program()
    n_servers = chance.randint(2, 4)
    faults = _faults(chance, n_servers)
    ends = _Ends()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of states that differ at first: each program says whether they do
        os.environ["BML_DEBUG"] = "1" if program.flaw == "changed before it is committed" else "0"
        company = run(program.compiled(), range(n_servers), faults, ends)
    violations = [*company.violations, *_judge(program, n_servers, company, ends)]
    return Verdict(seed, program, faults, n_servers, company, tuple(violations))


def check_all(seeds: Iterable[int]) -> Tally:
    """Run the programs of all these seeds, one after the other."""
    tally = Tally()
    for seed in seeds:
        found = check(seed)
        company, broken = found.company, "; ".join(found.violations) or None
        tally.count(seed, company.n_faults, company.committed, company.error is not None, broken)
    return tally


def _faults(chance: random.Random, n_servers: int) -> Faults:
    found = Faults()
    servers = list(range(n_servers))
    if chance.random() < 0.25:
        found.absent = (chance.choice(servers),)
    for server in chance.sample(servers, chance.choice([0, 0, 1, 1, n_servers - 1])):
        if server not in found.absent:
            found.kills[server] = (
                chance.randint(1, _MOST_CALLS // 2),
                chance.choice(["before", "brought", "committed"]),
            )
    if chance.random() < 0.1:
        found.leaves[chance.choice(servers)] = chance.randint(1, 10)
    for _ in range(chance.choice([0, 1, 1, 2])):
        server = chance.choice([*found.absent, *found.kills, *found.leaves, chance.choice(servers)])
        found.joins.append((chance.randint(1, _MOST_CALLS // 2), server))
    return found


def _judge(program: Program, n_servers: int, company: Company, ends: _Ends) -> list[str]:
    """What is wrong with how a job ended."""
    found = []
    for line, error in ends.errors:
        if not _may_raise(program, line, error):
            found.append(f"server {line.server} ended by {type(error).__name__}: {error}")
    if company.error is not None or not ends.values:
        return found
    if (
        len(set(ends.digests.values())) > 1
        or len({each and each["digest"] for each in ends.ledgers.values()}) > 1
    ):
        found.append(f"parameters or ledgers differ: {ends.digests} {ends.ledgers}")
    if program.flaw in BY_SERVER:
        return found  # what is right for one of them is wrong for the other
    if not any(_equal(program, server, n_servers, ends) for server in range(n_servers)):
        found.append(f"other numbers than the oracle's: {ends.values} {ends.ledgers}")
    return found


def _may_raise(program: Program, line: Line, error: BaseException) -> bool:
    """Whether this is an error that the program, or what befell the server, deserves."""
    name = type(error).__name__
    if name in ("Evicted", "TooFewServers", *program.errors):
        return True
    if program.flaw and name == "TrainingError":
        return True  # what the server raised that it names is judged there
    if line.joins and name == "UsageError" and program.between:
        return "joins a running job" in str(error)
    return False


def _equal(program: Program, server: int, n_servers: int, ends: _Ends) -> bool:
    """Whether all have what the oracle has, when the state of this server was taken at the beginning."""
    oracle = OracleSession(range(n_servers), server)
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
