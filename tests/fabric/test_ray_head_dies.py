"""The machine with Ray's head dies: with Redis it comes back, and the job goes on; without, the job ends.

The machines are namespaces of an emulated fabric, and all processes on that of the head are killed. The
launcher is on another one.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray_cluster as clusters

import bml
from bml.pytest_plugin import BringUp
from bml.train.keeping.files import Folder
from bml.train.keeping.resuming import newest_whole

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FABRIC = "bcube:2x1"
N_BATCHES = 1000
AWAY_STEPS = 20
"""So many steps the job does while there is no head."""
TRAINING = f"""
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def train(session):
    w = np.zeros(300, np.float32)
    session.state(params=w)

    def gradient(indices):
        return np.sin(indices[:, None] * np.float32(0.7) + w).sum(axis=0, dtype=np.float32)

    for batch in session.batches({36 * N_BATCHES}, global_batch=36, epochs=1, seed=3):
        w -= np.float32(0.1) * batch.allreduce(gradient(batch.indices), recompute=gradient)
        if not (HERE / "hurry").exists():
            time.sleep(0.1)
            (HERE / f"at-{{session.server}}").write_text(str(batch.batch_no))
    return float(w.sum(dtype=np.float64))
"""


class Job:
    """`bml run` on the machine of server 0."""

    def __init__(self, folder: Path, cluster: clusters.RayCluster, *options: str):
        self._folder, self._cluster = folder, cluster
        self.status = folder / "status"
        command = [sys.executable, "-m", "bml", "run", str(folder / "training.py"), "--fabric", FABRIC]
        command += ["--address", cluster.address, "--report", "report.json", *options]
        status = "echo $? > status.new; mv status.new status; sleep 999"
        # It is about Ray's head: no server may be lost, though two machines of Ray start on two cores.
        cluster.start_nodes(f"BML_DETECT_S=2 {' '.join(command)} > out.txt 2> err.txt; {status}")

    def at(self) -> int:
        """The batch that the slowest server has come to."""
        found = [int(path.read_text() or 0) for path in self._folder.glob("at-*")]
        return min(found) if len(found) == 2 else 0

    def until_at(self, batch: int) -> None:
        self._cluster.until(lambda: self.at() >= batch or self.status.exists(), f"it is not at batch {batch}")
        assert not self.status.exists(), self.words()

    def ended(self, within_s: float) -> int:
        self._cluster.until(self.status.exists, "the job did not end", within_s)
        return int(self.status.read_text())

    def words(self) -> str:
        return (self._folder / "out.txt").read_text() + (self._folder / "err.txt").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "training.py").write_text(TRAINING)
    return tmp_path


def undisturbed(folder: Path, **settings: Any) -> bml.Result:
    """The same training on plain processes, from its beginning or from a checkpoint."""
    (folder / "hurry").touch()
    module = ModuleType("training")
    module.__file__ = str(folder / "training.py")
    exec(TRAINING, module.__dict__)
    train: Callable[[bml.Session], float] = module.train
    options = {"launcher": "processes", "transport": "tcp", "prints": False, **settings}
    return bml.launch(train, FABRIC, **options)


def digest(report: dict[str, Any]) -> str:
    assert report["samples"]["complete"], "every sample is used exactly once"
    (found,) = set(report["digests"].values())
    return str(found)


def test_with_redis_the_job_goes_on(emulated_fabric: BringUp, folder: Path) -> None:
    if clusters.redis() is None:
        pytest.skip("Redis is not installed (on Debian: apt-get install redis-tools)")
    with clusters.ray_cluster(emulated_fabric(FABRIC), folder, True, 300.0) as cluster:
        job = Job(folder, cluster)
        job.until_at(5)
        cluster.kill_head()
        before = job.at()
        job.until_at(before + AWAY_STEPS)
        assert not cluster.head_answers()
        cluster.start_head()
        job.until_at(job.at() + AWAY_STEPS)
        (folder / "hurry").touch()
        assert job.ended(60) == 0, job.words()
        cluster.until(lambda: not cluster.actors(), f"left behind: {cluster.actors()}", 20)
    report = json.loads((folder / "report.json").read_text())
    assert report["dead"] == {}
    assert len(report["views"]) == 1, "no server was taken for dead"
    assert digest(report) == digest(undisturbed(folder).report)


def test_without_redis_it_ends_with_a_checkpoint(emulated_fabric: BringUp, folder: Path) -> None:
    patience_s, kept = 30.0, folder / "kept"
    with clusters.ray_cluster(emulated_fabric(FABRIC), folder, False, patience_s) as cluster:
        job = Job(folder, cluster, "--checkpoint", str(kept), "--every", "1000000")
        job.until_at(5)
        cluster.kill_head()
        killed, before = time.monotonic(), job.at()
        assert job.ended(4 * patience_s) == 1
        took_s = time.monotonic() - killed
        cluster.until(lambda: not cluster.actors(), f"left behind: {cluster.actors()}", patience_s)
        words = job.words()
    assert took_s >= 0.4 * patience_s, "it was given time to come back"
    assert re.search(rf"Error: Ray's head at {re.escape(cluster.address)} has been gone for \d+ s", words), (
        words
    )
    assert f"bml run … --resume {kept}" in words.replace("\n", " ")
    assert newest_whole(Folder(str(kept))).steps > before
    whole = undisturbed(folder)
    assert digest(undisturbed(folder, resume=kept).report) == digest(whole.report)
