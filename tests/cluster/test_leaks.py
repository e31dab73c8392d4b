"""View after view in one process, with real sockets: descriptors, threads, memory, tables stay as they are.

Server 3 leaves and comes again in another incarnation, over and over: three views each time. BML_SOAK_VIEWS
says how many there are to be (make soak: 1,000).
"""

from __future__ import annotations

import collections
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from descriptors import opened
from one_process import DEADLINE_S, OneProcess

import bml.cluster.steps.mailbox
import bml.predict.pace
import bml.predict.step_time
import bml.protocol.record.tape
import bml.protocol.server.history
from bml.cluster.spec.job import JobSpec
from bml.train.session import Session

VIEWS = int(os.environ.get("BML_SOAK_VIEWS", "60"))
WARM = 30
COMES_AND_GOES = 3
#: What is kept up to a bound (here a low one): commits and views for the report, inputs for a replay, steps
#: for predictions.
FEW = 16
FEW_INPUTS = 1 << 9
KEPT = ("commit_at_s", "views", "log", "_noted")

pytestmark = [pytest.mark.real, pytest.mark.timeout(60 + VIEWS)]


class World(OneProcess):
    """A bcube:2x2 of which one server comes and goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over = threading.Event()
        self._incarnations = 0
        super().__init__(monkeypatch, JobSpec("bcube:2x2", detect_s=1.0), self._step)

    def comes_and_goes(self) -> None:
        """Three views: one without the server, one with it again, one in which it contributes."""
        gone = self.servers[COMES_AND_GOES]
        gone.leave("for a while")
        self.until(lambda now: COMES_AND_GOES not in now["members"])
        self.threads[COMES_AND_GOES].join(DEADLINE_S)
        assert not self.threads[COMES_AND_GOES].is_alive(), "it does not end"
        self._incarnations += 1
        back = self.servers[COMES_AND_GOES] = self.make(COMES_AND_GOES, self._incarnations)
        self.threads[COMES_AND_GOES] = self.run(back, self.contacts())
        self.coordinator.join(COMES_AND_GOES, self._incarnations, back.contact)
        self.until(lambda now: COMES_AND_GOES in now["members"] and not now["learners"])

    def end(self) -> None:
        self.over.set()
        self.wait()

    def _step(self, session: Session) -> int:
        w = np.zeros(100)
        session.state(params=w)
        for _ in session.steps(1 << 40):
            time.sleep(0.001)
            over = float(self.over.is_set())
            total = session.allreduce(np.append(np.ones(len(w)), over))
            w += total[:-1] / len(session.contributors)
            if total[-1]:
                break
        assert (w == w[0]).all()
        return int(w[0])


def tables(thing: object, path: str = "", depth: int = 5) -> Iterator[tuple[str, int]]:
    """(path, size) of every container that the attributes of an object of ours lead to."""
    names = getattr(thing, "__dict__", None) or {
        name: getattr(thing, name) for name in getattr(thing, "__slots__", ()) if hasattr(thing, name)
    }
    for name, value in names.items():
        if name in KEPT or depth == 0:
            continue
        if isinstance(value, dict | list | set | collections.deque):
            yield f"{path}.{name}", len(value)
            inner = list(value.values() if isinstance(value, dict) else value)
            for each in inner if len(inner) < 20 else []:
                yield from tables(each, f"{path}.{name}[]", depth - 1)
        elif type(value).__module__.startswith("bml.") and not isinstance(value, type):
            yield from tables(value, f"{path}.{name}", depth - 1)


def measure(world: World) -> tuple[dict[str, int], dict[str, int]]:
    """Descriptors, threads and resident memory; the sizes of all tables of who stays."""
    gc.collect()
    resident_nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    sizes: dict[str, int] = {}
    for name, thing in (("coordinator", world.coordinator), ("server 0", world.servers[0])):
        for path, size in tables(thing, name):
            sizes[path] = sizes.get(path, 0) + size
    process = {
        "descriptors": len(opened()),
        "threads": threading.active_count(),
        "resident_nbytes": resident_nbytes,
    }
    return process, sizes


def test_view_changes_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bml.cluster.steps.mailbox, "_COMMITS_KEPT", FEW)
    monkeypatch.setattr(bml.protocol.server.history, "_VIEWS_KEPT", FEW)
    monkeypatch.setattr(bml.predict.step_time, "VIEWS_KEPT", FEW)
    monkeypatch.setattr(bml.predict.pace, "VIEWS_KEPT", FEW)
    monkeypatch.setattr(bml.protocol.record.tape, "MOST_ENTRIES", FEW_INPUTS)
    world = World(monkeypatch)
    world.until(lambda now: now["epoch"] == 1)
    while world.now["epoch"] < WARM:
        world.comes_and_goes()
    before, sizes_before = measure(world)
    begun_s, first = time.monotonic(), world.now["epoch"]
    while world.now["epoch"] < WARM + VIEWS:
        world.comes_and_goes()
    n_views, took_s = world.now["epoch"] - first, time.monotonic() - begun_s
    world.until(lambda _: threading.active_count() <= before["threads"])  # of an incarnation that has left
    after, sizes_after = measure(world)
    n_inputs = len(world.servers[0]._shell.core._tape.log)
    world.end()
    growth = after["resident_nbytes"] - before["resident_nbytes"]
    print(json.dumps({"views": n_views, "seconds": round(took_s, 1), "before": before, "after": after}))
    grown = {
        path: (sizes_before.get(path, 0), n)
        for path, n in sizes_after.items()
        if n > sizes_before.get(path, 0)
    }
    print("tables that are longer:", grown)
    assert len({report.value for report in world.reports if report.outcome == "done"}) == 1
    assert after["descriptors"] <= before["descriptors"] + 2, "a connection may be on its way"
    # A table may hold what is under way (timers, frames), but not something of every view.
    assert {
        path: sizes for path, sizes in grown.items() if sizes[1] - sizes[0] > max(12, n_views // 10)
    } == {}
    assert 0 < n_inputs < 3 * FEW_INPUTS, "the flight recorder must throw away what is old"
    assert growth < 4 << 20, f"{growth} bytes more after {n_views} views"
