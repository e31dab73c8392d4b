"""Ray on the emulated fabric: a node in each namespace, and every fault is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import jobs
import numpy as np
import psutil
import pytest

import bml
from bml import fabric
from bml.cluster.emulated import ray_nodes
from bml.cluster.fleets.machines import MACHINE_FOLDER
from bml.errors import StartError
from bml.fabric import EmulatedFabric, namespace
from bml.pytest_plugin import BringUp
from bml.train.batches import BatchPlan

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 100_000
PACE_S = 0.002


def training(stop: Path) -> Callable[[bml.Session], dict[str, Any]]:
    """The toy training, until there is a file `stop`: what is done to the job meanwhile may take its time."""

    def train(session: bml.Session) -> dict[str, Any]:
        w = session.empty(jobs.LENGTH)
        w[:] = 0
        session.state(params=w)
        joined, steps = session.joins, 0

        def again(indices: Any) -> Any:
            return jobs.sample_rows(indices, w)

        for batch in session.batches(jobs.N_SAMPLES, global_batch=jobs.GLOBAL_BATCH, epochs=EPOCHS, seed=3):
            time.sleep(PACE_S)
            w -= np.float32(0.1) * batch.allreduce(again(batch.indices), recompute=again)
            steps += 1
            if session.allreduce(np.array([stop.exists()]).astype(np.int32), op="max")[0]:
                break
        return {"params": w, "steps": steps, "joined": joined}

    return train


def reference(steps: int) -> Any:
    """The same on one process."""
    w = np.zeros(jobs.LENGTH, np.float32)
    for _, batch in zip(range(steps), BatchPlan(jobs.N_SAMPLES, jobs.GLOBAL_BATCH, EPOCHS, 3), strict=False):
        w -= np.float32(0.1) * (jobs.sample_rows(batch.indices, w) / np.float32(len(batch.indices)))
    return w


def until(
    job: bml.Job, condition: Callable[[dict[str, Any]], object], within_s: float = 60.0
) -> dict[str, Any]:
    deadline = time.monotonic() + within_s
    while not condition(now := job.status()):
        assert job.running, "the job is over"
        assert time.monotonic() < deadline, now
    return now


def check_nothing_is_left(network: EmulatedFabric) -> None:
    """After the end of a launcher; one that was killed cannot wait for the end of its processes."""
    nodes = [network.layout.namespace(node) for node in network.layout.nodes]
    deadline = time.monotonic() + 60
    while left := namespace.processes(nodes):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert MACHINE_FOLDER not in Path("/proc/mounts").read_text()
    assert network.status()["failures"] == []


@pytest.mark.serial("a death is noticed in 5 s, of which Ray needs 14")
def test_a_cable_is_cut_and_a_node_dies_and_comes_again(emulated_fabric: BringUp, tmp_path: Path) -> None:
    network, stop = emulated_fabric("bcube:2x2", "100mbit"), tmp_path / "stop"
    shared_memory, said = set(os.listdir("/dev/shm")), list[str]()
    settings = {"emulated": network.name, "prints": False, "on_start": said.append}
    with bml.start(training(stop), "bcube:2x2", **settings) as job:
        nics = job.status()["servers"][1]["nics"]
        assert [nic["address"] for nic in nics] == list(network.layout.nics(1)), "bound to its own NICs"
        job.inject("cut:1/0")
        until(job, lambda now: now["failures"] == ["link:1/0"])
        assert network.status()["failures"] == ["cut:1/0"]
        assert "machine" in job.inject("node:0")["done"][0]
        now = until(job, lambda now: "server:0" in now["failures"] and 0 in now["lost"])
        assert "its machine is dead" in now["lost"][0] or "Ray" in now["lost"][0]
        assert namespace.processes([network.namespace(0)]) == {}, "nothing of it lives"
        job.inject("join:0")
        until(job, lambda now: now["members"] == [0, 1, 2, 3] and not now["learners"])
        stop.touch()
        result = job.wait(60)
    assert "4 of 4 Ray nodes are up" in said
    steps = result.values[1]["steps"]
    assert {server: value["joined"] for server, value in result.values.items()} == {
        0: True, 1: False, 2: False, 3: False,
    }  # fmt: skip
    assert 0 < result.values[0]["steps"] < steps
    assert len(set(result.report["digests"].values())) == 1
    np.testing.assert_allclose(result.values[0]["params"], reference(steps), rtol=1e-3, atol=1e-5)
    cut, died = result.report["views"][1:3]
    assert "its own server says: NIC 1/0 (b0) has no carrier" in cut["reason"]
    assert died["members"] == [1, 2, 3]
    assert died["noticed_s"] + died["recover_s"] < 5.0, "Ray takes 14 s to notice"
    check_nothing_is_left(network)
    assert set(os.listdir("/dev/shm")) == shared_memory


def test_a_node_that_cannot_start_is_named_with_its_log(
    emulated_fabric: BringUp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = emulated_fabric("bcube:2x1")
    monkeypatch.setattr(ray_nodes, "_OBJECT_STORE_NBYTES", 1)  # less than Ray takes
    with pytest.raises(StartError, match=r"(?s)the Ray node of server [01] ended with status .*object store"):
        bml.launch(training(tmp_path), "bcube:2x1", emulated=network.name, prints=False)
    check_nothing_is_left(network)


@pytest.mark.parametrize(
    ("sign", "until_said", "status"),
    [(signal.SIGINT, "head", 1), (signal.SIGTERM, "head", 143), (signal.SIGKILL, "of 2 Ray nodes", -9)],
)
def test_a_launcher_that_is_ended_takes_everything_along(
    emulated_fabric: BringUp, tmp_path: Path, sign: signal.Signals, until_said: str, status: int
) -> None:
    network = emulated_fabric("bcube:2x1")
    (tmp_path / "endless.py").write_text("def train(session):\n    while True:\n        session.barrier()\n")
    command = [sys.executable, "-m", "bml", "run", str(tmp_path / "endless.py"), "--fabric", "bcube:2x1"]
    with commands.begun(*command, "--fabric-emulated", "--fabric-name", network.name, cwd=ROOT) as process:
        assert process.stdout is not None
        assert any(until_said in line for line in iter(process.stdout.readline, ""))
        deadline = time.monotonic() + 60
        while len(family := psutil.Process(process.pid).children(recursive=True)) < 4:
            assert time.monotonic() < deadline, "no driver is started"
        process.send_signal(sign)
        process.communicate(timeout=30)
    assert process.returncode == status
    assert psutil.wait_procs(family, timeout=30)[1] == []
    check_nothing_is_left(network)


def test_a_fabric_that_is_made_for_a_job_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = fabric.obstacle()
    if reason is not None:
        pytest.skip(reason)
    name = f"t{os.getpid()}made"
    monkeypatch.setattr(fabric, "DEFAULT_NAME", name)

    def train(session: bml.Session) -> float:
        return float(session.allreduce(np.ones(3))[0])

    result = bml.launch(train, "bcube:2x1", launcher="processes", emulated=name, prints=False)
    assert result.value == 2.0
    assert not fabric.is_up(name)
    assert not [each for each in namespace.names() if each.startswith(name)]
    # One whose maker was killed counts as left behind: the next one replaces it.
    gone = subprocess.Popen(["true"])
    gone.wait()
    fabric.up("bcube:2x2", name=name, maker=gone.pid)
    result = bml.launch(train, "bcube:2x1", launcher="processes", emulated=name, prints=False)
    assert result.value == 2.0
    assert not fabric.is_up(name)
