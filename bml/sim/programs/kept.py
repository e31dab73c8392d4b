"""Runs random programs that make checkpoints, kills everything at random moments, and goes on each time.

The last job runs to its end. Its values and its ledgers must be the oracle's, so no sample was lost or used
twice. Once a checkpoint is whole there is always one, and none is older than the one before.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from bml.sim.check import Tally
from bml.sim.programs.check import Ends, judge, random_faults
from bml.sim.programs.disk import Disk
from bml.sim.programs.faults import Faults
from bml.sim.programs.group import AllDead, Group
from bml.sim.programs.running import run
from bml.sim.programs.writer import Program, Writer
from bml.topology.errors import UsageError
from bml.train.keeping.parts import Key, by_key
from bml.train.keeping.resuming import Resumed, clear_unbegun, newest_whole, read

_MOST_SERVERS = 4
_MOST_DEATHS = 3
_MOST_STEPS = 40
_MOST_OPERATIONS = 80
_SLOW_S = 0.02  # as a write of a slow disk


@dataclass
class KeptProgram:
    """A program, what happened to its jobs, and the violations; no violation if all is right."""

    seed: int
    program: Program
    n_resumed: int = 0
    n_steps: int = 0
    n_faults: int = 0
    failed: bool = False
    story: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        said = "\n".join(f"  {each}" for each in (*self.story, *(self.violations or ["holds"])))
        return f"seed {self.seed}\n{said}\n\n{self.program.text}"


class _Jobs:
    """One job after the other on one folder."""

    def __init__(self, seed: int):
        self._chance = random.Random(f"kept {seed}")
        self.found = KeptProgram(seed, Writer(self._chance, False).program())
        self._program = _shorter(self._chance, self.found.program)
        """That of all jobs but the last: its last loop is shorter, as of a user who goes on for longer."""
        self._every, self._keep = self._chance.choice([1, 2, 3, 5, 10]), self._chance.randint(1, 3)
        self._late = self._chance.choice([None, None, 0, 5])
        """In so many listings an object may be missing; None: it is a folder of a file system."""
        self._files: dict[str, bytes] = {}
        self._unlisted: dict[str, int] = {}
        self._newest: Key | None = None
        self._n_jobs = 0

    def run_all(self) -> KeptProgram:
        """Run jobs that die, and one that does not."""
        for _ in range(self._chance.randint(1, _MOST_DEATHS)):
            if not self._run(is_last=False) or self.found.violations:
                return self.found
        self._program = self.found.program
        self._run(is_last=True)
        return self.found

    def _run(self, is_last: bool) -> bool:
        """Run a job; returns whether it died, so that another one must go on."""
        chance, n_servers = self._chance, self._chance.randint(2, _MOST_SERVERS)
        faults = replace(random_faults(chance, n_servers), interrupts={})
        dies_at = None
        if not is_last and chance.random() < 0.6:
            dies_at = chance.randint(1, _MOST_OPERATIONS)
        elif not is_last:
            faults.ends_after = chance.randint(1, _MOST_STEPS)
        disk, ends = Disk(chance, self._files, dies_at, self._late), Ends()
        disk.unlisted = self._unlisted
        resumed = self._resumed(disk)
        self.found.story.append(
            f"{n_servers} servers from {self._newest}, disk dies at {dies_at}, "
            f"lists late {self._late}: {faults}"
        )
        group = self._group(n_servers, faults, disk, ends, resumed)
        disk.die()
        self._files, self._unlisted = disk.files, disk.unlisted
        self._note(group, ends)
        self._look(disk)
        if isinstance(group.error, AllDead):
            return True
        self.found.violations += judge(self._program, _MOST_SERVERS, ends)
        return False

    def _group(
        self, n_servers: int, faults: Faults, disk: Disk, ends: Ends, resumed: Resumed | None
    ) -> Group:
        slow = self._chance.choice([0, 0, 1, 8])

        def is_made(group: Group) -> None:
            disk.on_death = group.kill_all
            if slow:
                disk.on_write = lambda: group.let_pass(slow, _SLOW_S)

        def begin(session: Any) -> None:
            if resumed is not None and not session.joins:
                session.resume(resumed)
            session.checkpoint(disk, every=self._every, keep=self._keep)

        self._n_jobs += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            group = run(
                self._program.compiled(),
                range(n_servers),
                faults,
                ends.note,
                begin,
                f"job{self._n_jobs}",
                is_made,
            )
        ends.failed = group.error is not None
        return group

    def _resumed(self, disk: Disk) -> Resumed | None:
        if self._newest is None and not self._begins_late(disk):
            return None
        assert self._newest is not None
        self.found.n_resumed += 1
        return Resumed(self._newest, read(disk, self._newest))

    def _begins_late(self, disk: Disk) -> bool:
        """Leave nothing in the folder, as a user does who begins again, or the command that always resumes.

        A whole checkpoint that no listing had is refused by that job later; it returns whether there is one.
        """
        if self._chance.random() < 0.5 and clear_unbegun(disk, 2 * self._every):
            gone = {*by_key(self._files)} - {*by_key(disk.files)}
            self.found.violations += [
                f"{key} was whole, and is removed" for key in gone if self._was_whole(key)
            ]
            disk.unlisted.clear()
            self._look(disk)
        if self._newest is None:
            disk.files.clear()
        return self._newest is not None

    def _was_whole(self, key: Key) -> bool:
        try:
            return bool(read(Disk(self._chance, self._files), key))
        except UsageError:
            return False

    def _note(self, group: Group, ends: Ends) -> None:
        found = self.found
        found.n_steps += group.committed
        found.n_faults += group.n_faults + isinstance(group.error, AllDead)
        found.failed = ends.failed
        ends.errors = [each for each in ends.errors if not isinstance(each[2], AllDead)]
        found.violations += group.violations

    def _look(self, disk: Disk) -> None:
        """Find the newest whole checkpoint: there is one if there was one, and it is not older."""
        before = self._newest
        try:
            self._newest = newest_whole(disk)
        except UsageError as error:
            if before is not None:
                self.found.violations.append(f"{before} is gone: {error}")
            return
        if before is not None and self._newest.steps < before.steps:
            self.found.violations.append(f"{self._newest} is older than {before}, which was there before")


def _shorter(chance: random.Random, program: Program) -> Program:
    """A program whose last loop is shorter, if that is one of the session and of two iterations or more."""
    *_, last = re.finditer(r"^    for .*$", program.text, re.MULTILINE)
    number = re.search(r"(?<=epochs=)\d+|(?<=session\.steps\()\d+(?=\):)", last[0])
    if number is None or int(number[0]) < 2:
        return program
    start = last.start() + number.start()
    fewer = chance.randint(1, int(number[0]) - 1)
    text = program.text[:start] + str(fewer) + program.text[start + len(number[0]) :]
    return program._replace(text=text)


def check_kept(seed: int) -> KeptProgram:
    """Run the program of a seed in jobs that die, and one that does not."""
    return _Jobs(seed).run_all()


def check_all_kept(seeds: Iterable[int]) -> Tally:
    """Run the programs of all these seeds, one after the other."""
    tally = Tally()
    for seed in seeds:
        found = check_kept(seed)
        tally.count(seed, found.n_faults, found.n_steps, found.failed, "; ".join(found.violations) or None)
    return tally
