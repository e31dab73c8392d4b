"""What a checkpoint costs a step, and whether jobs that die as a whole lose anything.

    python benchmarks/checkpoints.py                          # both
    python benchmarks/checkpoints.py --size 256MiB --kills 0
    python benchmarks/checkpoints.py --size 0 --kills 100

**Pause.** Four servers with a state of `--size` write a checkpoint after every tenth step. A pause is the
time between two iterations of the loop. Beside it stands the time in which each server copies its part of the
state, and all of it, while the others copy theirs.

**Kills.** All servers of a job get SIGKILL at a random moment. The job goes on from its newest whole
checkpoint, and is killed again, until it ends. Its parameters must have the bits of a job that nothing
disturbed, and its ledger every sample exactly once. No life may begin more than two intervals before the step
of the last kill.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

import bml
from bml.lab.commands.quantities import parse_bytes

FABRIC, N_SERVERS = "bcube:2x2", 4
EVERY = 10
N_PAUSES = 20
N_BATCHES, BATCH = 150, 36
COMPUTES_S = 0.004
POLL_S = 0.002
PID, FIRST, LAST = range(3)
"""What a server notes: its process, the batch with which it began, and that in which it is, from 1 on."""


def pausing(session: bml.Session, nbytes: int) -> dict[str, Any]:
    """Measure pauses, in milliseconds, those that have a checkpoint and the others."""
    state = session.empty(nbytes // 4)
    state[:] = 1
    session.state(params=state)
    small = np.ones(1, np.float32)
    took: dict[bool, list[float]] = {True: [], False: []}
    keeper = session._whole.keeper
    assert keeper is not None
    begun, ended_at = 0, math.inf
    while len(took[True]) < N_PAUSES:
        for _ in session.steps(EVERY):
            took[begun != keeper._begun].append(1e3 * (time.perf_counter() - ended_at))
            begun = keeper._begun
            time.sleep(COMPUTES_S)
            state[:1] += session.allreduce(small)
            ended_at = time.perf_counter()
    return {"with_ms": median(took[True]), "first_ms": took[True][0], "without_ms": median(took[False])}


def copying(session: bml.Session, nbytes: int) -> dict[str, float]:
    """Measure how long copies take into memory that was used before, in milliseconds."""
    source, copy = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    small = np.ones(1)
    took: dict[str, list[float]] = {"part_ms": [], "state_ms": []}
    for _ in session.steps(N_PAUSES):
        for name, n in (("part_ms", nbytes // N_SERVERS), ("state_ms", nbytes)):
            session.allreduce(small)  # all copy at one time
            began = time.perf_counter()
            copy[:n] = source[:n]
            took[name].append(1e3 * (time.perf_counter() - began))
    return {name: median(each) for name, each in took.items()}


def measure_pause(nbytes: int, disk: str) -> dict[str, Any]:
    """The slowest server's figures."""
    found: dict[str, Any] = {"nbytes": nbytes}
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        paused = bml.launch(
            partial(pausing, nbytes=nbytes), FABRIC, launcher="processes", checkpoint=folder, every=EVERY
        )
    copied = bml.launch(partial(copying, nbytes=nbytes), FABRIC, launcher="processes")
    for values in (paused.values, copied.values):
        for name in values[0]:
            found[name] = round(max(each[name] for each in values.values()), 3)
    return found


def train(session: bml.Session, file: str = "") -> None:
    """Batches whose result depends on every sample and on the order of all steps."""
    w, momentum = np.zeros(100_000, np.float32), np.zeros(100_000, np.float32)
    session.state(params=w, momentum=momentum)
    notes = np.memmap(file, np.int64, "r+", shape=(N_SERVERS, 3)) if file else np.zeros((N_SERVERS, 3))
    note = notes[session.server]

    def gradient(indices: Any) -> Any:
        return w * np.float32(0.01 * len(indices)) + np.float32(np.sin(indices).sum())

    for batch in session.batches(BATCH * N_BATCHES, global_batch=BATCH, epochs=1, seed=1):
        note[FIRST] = note[FIRST] or batch.batch_no + 1
        note[LAST] = batch.batch_no + 1
        note[PID] = os.getpid()
        time.sleep(COMPUTES_S)
        momentum *= np.float32(0.5)
        momentum += batch.allreduce(gradient(batch.indices), recompute=gradient)
        w -= momentum


class Lives:
    """A training that is killed again and again, until one of its lives ends by itself."""

    def __init__(self, folder: Path, chance: random.Random):
        self._folder, self._chance = folder, chance
        self.n_kills, self.oldest = 0, 0
        """How many batches the life that began furthest back had to do again."""
        self._reached = 0

    def live(self, most_kills: int) -> bml.Result:
        """Return the result of the last life, which is killed no more."""
        while True:
            result = self._one(self.n_kills < most_kills)
            if result is not None:
                return result
            self.n_kills += 1

    def _one(self, is_killed: bool) -> bml.Result | None:
        file, kept = self._folder / "notes", self._folder / "kept"
        notes = np.memmap(file, np.int64, "w+", shape=(N_SERVERS, 3))
        function = partial(train, file=str(file))
        with bml.start(
            function, FABRIC, launcher="processes", checkpoint=kept, resume=kept, every=EVERY, keep=1
        ) as job:
            if is_killed:
                self._kill(job, notes)
            try:
                return job.wait()
            except bml.BmlError:
                if not is_killed:
                    raise
                return None
            finally:
                if notes[:, FIRST].all():
                    self.oldest = max(self.oldest, self._reached + 1 - int(notes[:, FIRST].min()))
                self._reached = max(self._reached, int(notes[:, LAST].max()))

    def _kill(self, job: bml.Job, notes: Any) -> None:
        while job.running and not notes[:, PID].all():
            time.sleep(POLL_S)
        time.sleep(self._chance.uniform(0, N_BATCHES * COMPUTES_S))
        for pid in notes[:, PID].tolist():
            if job.running and pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def digest(result: bml.Result) -> str:
    """The digest of the parameters; raises AssertionError if samples or servers differ from what must be."""
    assert result.report["samples"]["complete"], result.report["samples"]
    (found,) = set(result.report["digests"].values())
    return str(found)


def count_losses(n_kills: int, seed: int) -> dict[str, Any]:
    """Kill jobs so many times."""
    wanted = digest(bml.launch(train, FABRIC, launcher="processes"))
    chance, found = random.Random(seed), {"kills": 0, "trainings": 0, "different": 0, "oldest_batches": 0}
    while found["kills"] < n_kills:
        with tempfile.TemporaryDirectory() as folder:
            lives = Lives(Path(folder), chance)
            result = lives.live(n_kills - found["kills"])
        found["trainings"] += 1
        found["kills"] += lives.n_kills
        found["different"] += digest(result) != wanted
        found["oldest_batches"] = max(found["oldest_batches"], lives.oldest)
        click.echo(f"{found['kills']} kills, {found['trainings']} trainings ended", err=True)
    return {**found, "every": EVERY}


@click.command()
@click.option("--size", default="64MiB", show_default=True, help="Of the state; 0 measures no pause.")
@click.option("--disk", default="/dev/shm", show_default=True, help="A folder; pauses are those of its disk.")
@click.option("--kills", default=100, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the moments of the kills.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(size: str, disk: str, kills: int, seed: int, as_json: bool) -> None:
    """Measure the pauses of checkpoints, and kill whole jobs."""
    found: dict[str, Any] = {}
    if nbytes := parse_bytes(size):
        found["pause"] = measure_pause(nbytes, disk)
    if kills:
        found["kills"] = count_losses(kills, seed)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, figures in found.items():
        click.echo(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
