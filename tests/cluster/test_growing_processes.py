"""Jobs that begin with the least number of servers, grow, and shrink: the same bits, every sample once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.launcher.callbacks import Teller
from bml.cluster.launcher.launch import sizes
from bml.cluster.launcher.running import Job
from bml.cluster.process.pickling import pack
from bml.cluster.spec.job import JobSpec, Place, default_nics
from bml.errors import StartError

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

EPOCHS = 40
NOBODYS = "192.0.2.1"
"""An address for documentation: no machine has it."""


def fleet(there: Callable[[int], bool]) -> ProcessFleet:
    """Six to nine servers, of which each has its addresses as soon as it is there."""

    def place(server: int | None) -> Place:
        if server is None:
            return Place()
        return Place(default_nics(server, 2) if there(server) else (NOBODYS, NOBODYS))

    return ProcessFleet(JobSpec("bcube:3x2", transport="tcp", **sizes("bcube:3x2", (6, 9), ())), False, place)


def train(session: bml.Session) -> Any:
    """Batches take their time until nine servers have contributed, and then until five are left."""
    were_nine = session.joins

    def pause() -> None:
        nonlocal were_nine
        n = len(session.contributors)
        were_nine = were_nine or n == 9
        if not session.replays and n > (5 if were_nine else 0):
            time.sleep(0.05)

    return jobs.descend(session, epochs=EPOCHS, pause=pause)["params"]


def test_a_job_begins_with_six_servers_grows_to_nine_and_shrinks_to_five() -> None:
    come, nine = threading.Event(), threading.Event()
    contributors: list[int] = []

    def changed(now: dict[str, Any]) -> None:
        contributors.append(len(now["members"]) - len(now["learners"]))
        if now["step"] >= 5:
            come.set()
        if contributors[-1] == 9:
            nine.set()

    with Job(
        made := fleet(lambda server: server < 6 or come.is_set()), made.spec, "processes", Teller(changed)
    ) as job:
        job.begin(pack(train))
        assert job.status()["awaited"] == [6, 7, 8]
        assert nine.wait(60), "it did not grow"
        assert job.status()["awaited"] == []
        for server in (5, 6, 7, 8):
            os.kill(jobs.process_of(job, server), signal.SIGTERM)
        result = job.wait(60)

    report = result.report
    print("views:", *((v["epoch"], v["commit"], v["reason"]) for v in report["views"]), report["sizes"])
    assert contributors[0] == 6
    assert report["views"][0]["failures"] == ["server:6", "server:7", "server:8"]
    assert sorted(result.values) == [0, 1, 2, 3, 4]
    assert report["dead"] == {}
    assert sorted(report["left"]) == [5, 6, 7, 8]
    assert all("it got SIGTERM" in why for why in report["left"].values())
    assert len(set(report["digests"].values())) == 1, "they hold different bits"
    assert report["samples"]["complete"], "a sample was used never, or twice"
    np.testing.assert_allclose(result.value, jobs.reference(EPOCHS), rtol=1e-4, atol=1e-5)

    found = report["sizes"]
    assert {5, 6, 9} <= found.keys()
    assert sum(size["steps"] for size in found.values()) == report["steps"]
    assert sum(size["samples"] for size in found.values()) == jobs.N_SAMPLES * EPOCHS
    assert all(size["samples"] == size["steps"] * jobs.GLOBAL_BATCH for size in found.values())
    assert found[9]["steps_per_s"] < 1 / 0.05, "a step takes at least as long as its pause"


def train_at_once(session: bml.Session) -> float:
    w = np.zeros(1)
    session.state(params=w)
    for _ in session.steps(50):
        w += session.allreduce(np.ones(1))
    return float(w[0])


def test_servers_that_never_come_are_named_at_the_end() -> None:
    made = fleet(lambda server: server < 6)
    with Job(made, made.spec, "processes", Teller(None)) as job:
        job.begin(pack(train_at_once))
        result = job.wait(60)
    assert result.values == dict.fromkeys(range(6), 300.0)
    assert sorted(result.dead) == [6, 7, 8]
    for server, why in result.dead.items():
        assert why.startswith((f"server {server} cannot start: ", "it had not come when the job ended"))
    assert list(result.report["sizes"]) == [6]
    assert result.report["sizes"][6]["steps"] == 50


def test_fewer_than_the_least_do_not_begin() -> None:
    made = fleet(lambda server: server < 5)
    why = r"begins with 6 servers or more: of 9, \d came .*cannot start"
    with Job(made, made.spec, "processes", Teller(None)) as job, pytest.raises(StartError, match=why):
        job.begin(pack(train))
