"""Servers that die, freeze, fall silent and come again, from a seed; every step is checked."""

from __future__ import annotations

import collections
import random
import struct
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import bml
from bml.errors import BmlError, FabricError
from bml.train.batches import BatchPlan

FABRIC, N_SERVERS, LEVELS = "bcube:3x2", 9, 2
N_SAMPLES, GLOBAL_BATCH, SEED, LENGTH = 720, 72, 3, 3000
ENDLESS = 1_000_000
#: Faults strike only while so many servers are there: a view must keep more than half of the one before.
FEWEST = 6
HANG_S = 30.0
#: A link that failed often is trusted again after 32 s; somebody may have to wait for that to be let in.
WAIT_S = 45.0
_COMMIT = "=qd"  # step, when: of the log that every server writes


def training(folder: Path) -> Any:
    """What every server runs, until the file `stop` is in the folder."""

    def train(session: bml.Session) -> dict[str, Any]:
        """Parameters count the steps; every batch brings all its samples, once each."""
        w = np.zeros(LENGTH, np.float64)
        taken = np.zeros(1, np.int64)
        session.state(params=w, taken=taken)
        plan = BatchPlan(N_SAMPLES, GLOBAL_BATCH, ENDLESS, SEED)
        stop = folder / "stop"

        def contribution(indices: Any, says: float = 0.0) -> Any:
            """Ones for every sample, the sum of the samples, and whether it is over."""
            total = np.full(LENGTH + 2, float(len(indices)))
            total[-2:] = float(indices.sum()), says
            return total

        with open(folder / f"{session.server}-{time.time_ns()}.commits", "wb", buffering=0) as log:
            batches = session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=ENDLESS, seed=SEED)
            for batch in batches:
                time.sleep(0.003)
                g = contribution(batch.indices, GLOBAL_BATCH if stop.exists() else 0.0)
                mean = batch.allreduce(g, recompute=contribution)
                log.write(struct.pack(_COMMIT, int(taken[0]) + 1, time.monotonic()))
                whole = plan.batch(int(taken[0])).indices
                taken += 1
                w += mean[:-2]
                assert (w == taken[0]).all(), f"step {taken[0]}: parameters are {w.min()} to {w.max()}"
                assert mean[-2] * GLOBAL_BATCH == whole.sum(), (
                    f"step {taken[0]} has not the samples of its batch"
                )
                if mean[-1]:
                    break
        return {"taken": int(taken[0])}

    return train


class Churn:
    """One run; `chance` decides everything but what the machine's load does."""

    def __init__(self, folder: Path, seconds: float, seed: int, transport: str = "tcp") -> None:
        self.tried: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self._folder = folder
        self._seconds = seconds
        self._transport = transport
        self._chance = random.Random(seed)
        self._waits: dict[tuple[int, int | None], float] = {}

    def run(self) -> bml.Result:
        """Raises what ends the job early; AssertionError with the job's status if it hangs."""
        train = training(self._folder)
        where = {"launcher": "processes", "transport": self._transport}
        with bml.start(train, FABRIC, start_s=30.0, **where) as job:
            end_s = time.monotonic() + self._seconds
            at, moved_s = -1, time.monotonic()
            next_s = moved_s + 1.0
            while time.monotonic() < end_s and job.running:
                time.sleep(0.05)
                now_s, step = time.monotonic(), job._snapshot["step"]
                if step != at:
                    at, moved_s = step, now_s
                assert now_s - moved_s < HANG_S, f"no step in {HANG_S} s: {job.status()}"
                self._check_waits(job, now_s)
                if now_s >= next_s:
                    self._act(job)
                    next_s = time.monotonic() + self._chance.uniform(0.5, 2.0)
            (self._folder / "stop").touch()
            try:
                return job.wait(30.0)
            except FabricError:
                assert not job.running, f"it does not end: {job.status()}"
                raise

    def _check_waits(self, job: bml.Job, now_s: float) -> None:
        """Nobody waits for ever to be let in, or to contribute."""
        now = job._snapshot
        outside = {
            (server, now["incarnations"].get(server)) for server in (*now["waiting"], *now["learners"])
        }
        self._waits = {each: self._waits.get(each, now_s) for each in outside}
        late = [server for (server, _), since_s in self._waits.items() if now_s - since_s > WAIT_S]
        assert not late, f"servers {late} have waited for {WAIT_S} s: {job.status()}"

    def _act(self, job: bml.Job) -> None:
        members = job._snapshot["members"]
        missing = sorted(set(range(N_SERVERS)) - set(members) | set(job._result.gone))
        present = sorted(set(members) - set(missing))
        if missing and (self._chance.random() < 0.6 or len(present) <= FEWEST):
            spec = f"join:{self._chance.choice(missing)}"
        elif len(present) <= FEWEST:
            return
        else:
            spec = self._fault(self._chance.choice(present))
        kind = spec.partition(":")[0]
        self.tried[kind] += 1
        try:
            job.inject(spec)
        except BmlError:
            self.refused[kind] += 1  # the server was gone before the fault could be applied

    def _fault(self, server: int) -> str:
        for_s = f"{self._chance.uniform(0.2, 1.5):.2f}s"
        how = self._chance.random()
        if how < 0.5:
            return f"kill:{server}"
        if how < 0.6:
            return "coordinator"
        if how < 0.8:
            return f"freeze:{server},for={for_s}"
        return f"blackhole:{server}/{self._chance.randrange(LEVELS)},for={for_s}"

    def commits(self) -> dict[int, float]:
        """Step -> when the first server committed it, on the machine's monotonic clock."""
        first: dict[int, float] = {}
        for path in self._folder.glob("*.commits"):
            data = path.read_bytes()
            whole = len(data) - len(data) % struct.calcsize(_COMMIT)  # a kill may cut the last one
            for step, at_s in struct.iter_unpack(_COMMIT, data[:whole]):
                first[step] = min(at_s, first.get(step, at_s))
        return first

    def views(self, result: bml.Result) -> list[dict[str, Any]]:
        """All views after the first that anybody who ended well has seen."""
        seen = {view["epoch"]: view for each in result.reports.values() for view in each.views}
        return [view for _, view in sorted(seen.items()) if view["reason"] != "start"]

    def figures(self, result: bml.Result) -> dict[str, Any]:
        """What to report of a run; `joined` to `recover_ms` are of views that the survivors have seen."""
        times = [at_s for _, at_s in sorted(self.commits().items())]
        gaps = sorted(b - a for a, b in pairwise(times))
        views = self.views(result)
        recovered = sorted(view["recover_s"] for view in views if view["recover_s"] is not None)
        return {
            "steps": len(times),
            "actions": dict(self.tried),
            "refused": dict(self.refused),
            "views": views[-1]["epoch"] if views else 1,
            "joined": sum(" joins" in view["reason"] for view in views),
            "caught_up": sum("has caught up" in view["reason"] for view in views),
            "gap_ms_median_p99_max": [round(1e3 * at(gaps, q), 1) for q in (0.5, 0.99, 1.0)],
            "recover_ms_median_max": [round(1e3 * at(recovered, q), 1) for q in (0.5, 1.0)],
            "ended": sorted(result.values),
        }


def at(ordered: list[float], quantile: float) -> float:
    return ordered[round(quantile * (len(ordered) - 1))] if ordered else 0.0
