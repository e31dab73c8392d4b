"""Ray actors over two RDMA NICs each: a NIC goes down, a server is killed, and every bit is right.

`BML_NICS` gives each actor of the one machine two NICs of its own. In software emulation Ray needs minutes.
"""

from __future__ import annotations

import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import bml
from bml.topology import parse
from bml.train.batches import BatchPlan

FABRIC, RAILS = "bcube:2x2", 2
N_SAMPLES, GLOBAL_BATCH, EPOCHS, LENGTH = 96, 16, 4, 60_000
STEPS = N_SAMPLES // GLOBAL_BATCH * EPOCHS
#: NIC 1/0 goes down, and leaves the line 1-3-2-0. Server 0 is its end then, and is killed.
DOWN, DOWN_AT, KILLED, KILL_AT = (1, 0), 8, 0, 16
DETECT_S, START_S, WITHIN_S = 6.0, 600.0, 600.0

Vector = npt.NDArray[np.float32]


def gradient(w: Vector, indices: Any) -> Vector:
    """The sum over these samples: whole numbers, so that every order of adding gives the same bits."""
    rows = (np.asarray(indices)[:, None] * 31 + np.arange(LENGTH)) % 10
    return (rows + np.floor(w) % 3).sum(axis=0).astype(np.float32)


def train(session: bml.Session, gate: str) -> dict[str, Any]:
    w = session.empty(LENGTH)
    w[:] = 0
    session.state(params=w)
    while not Path(gate).exists():
        time.sleep(0.1)
    seen: list[int] = []
    for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS, seed=0):
        if len(seen) + 1 == DOWN_AT and session.server == DOWN[0]:
            subprocess.run(["ip", "link", "set", "ps{}r{}".format(*DOWN), "down"], check=True)
        w += batch.allreduce(gradient(w, batch.indices), recompute=partial(gradient, w))
        seen.append(len(session.contributors))
    return {"contributors": seen, "params": w.copy()}


def alone() -> Vector:
    """The parameters of one process without faults: the means are sixteenths, and exact."""
    w = np.zeros(LENGTH, np.float32)
    for batch in BatchPlan(N_SAMPLES, GLOBAL_BATCH, EPOCHS, 0):
        w += gradient(w, batch.indices) / np.float32(len(batch.indices))
    return w


def test_ray_actors_over_two_rdma_nics_each_lose_a_nic_and_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun_s = tmp_path / "go", time.monotonic()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings: dict[str, Any] = {"transport": "verbs", "detect_s": DETECT_S, "start_s": START_S}
    faults = [f"kill:{KILLED}@step={KILL_AT}"]
    with bml.start(lambda session: train(session, str(gate)), FABRIC, faults=faults, **settings) as job:
        print(f"\n{FABRIC} on Ray: begun after {time.monotonic() - begun_s:.0f} s")
        status: dict[int, dict[str, Any]] = {}
        while len(status) < parse(FABRIC).n_servers:
            answers = job.status()["servers"].items()
            status |= {server: each for server, each in answers if "transport" in each}
            assert time.monotonic() < begun_s + WITHIN_S, f"only {sorted(status)} answer"
        gate.touch()
        result = job.wait(WITHIN_S)
    report = result.report
    for server, each in sorted(status.items()):
        print(f"server {server}: {each['transport']['name']}, {', '.join(each['transport']['devices'])}")
    for view in report["views"]:
        print(f"view {view['epoch']}: servers {view['members']}, broken {view['failures']}, {view['reason']}")
    print(f"ledger {report['samples']}; {time.monotonic() - begun_s:.0f} s")

    survivors = [server for server in parse(FABRIC).servers if server != KILLED]
    assert sorted(result.values) == survivors
    for server, each in status.items():
        assert each["transport"]["name"] == "verbs"
        assert [text.split(" (")[0] for text in each["transport"]["devices"]] == [
            f"rxe{server}_{rail} port 1, GID 1" for rail in range(RAILS)
        ]
    for server in survivors:
        metrics = report["metrics"][server]
        assert metrics["transport"]["name"] == "verbs"
        assert len(metrics["transport"]["devices"]) == RAILS
        for rail in range(RAILS):
            sent = {
                link: s["nbytes_sent"] for link, s in metrics["links"].items() if link.endswith(f"/{rail}")
            }
            assert sum(sent.values()) > 4 * LENGTH, f"NIC {server}/{rail} carried nothing: {sent}"
    failures = [view["failures"] for view in report["views"]]
    assert failures[0] == []
    assert f"link:{DOWN[0]}/{DOWN[1]}" in failures[1]
    assert any(f"server:{KILLED}" in each for each in failures)
    assert KILLED in report["dead"]
    for value in result.values.values():
        assert value["contributors"] == [4] * (KILL_AT - 1) + [3] * (STEPS - KILL_AT + 1)
        assert (value["params"] == alone()).all(), "other parameters than without faults"
    assert report["steps"] == STEPS
    assert len(set(report["digests"].values())) == 1, "they hold different bits"
    assert report["samples"]["complete"], "a sample was used never, or twice"
