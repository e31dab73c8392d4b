"""Real jobs that die as a whole, also while they write a checkpoint, and jobs that go on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from jobs import launch, wait_for

import bml
from bml.train.keeping.files import Folder
from bml.train.keeping.parts import UNFINISHED
from bml.train.keeping.resuming import newest_named, newest_whole

pytestmark = [pytest.mark.real, pytest.mark.timeout(100)]
FABRIC = "bcube:2x2"
N_STEPS = 60
ALL_DEAD = "killed by signal 9|servers are left"
"""They do not die at one moment: the last one may see that the others are gone."""


def train(session: Any, n: int, until: str = "", pids: str = "", pause_s: float = 0.0) -> float:
    """Steps whose result depends on every sample and on the order of all steps.

    With `pids` the servers note their processes there. From step 20 on, one that sees a file whose name ends
    in `until` kills all of them; at step 50 that happens in any case.
    """
    w, momentum = np.zeros(n, np.float32), np.zeros(n, np.float32)
    session.state(params=w, momentum=momentum)
    if pids:
        (Path(pids) / str(os.getpid())).touch()

    def gradient(indices: Any) -> Any:
        return w * np.float32(0.01 * len(indices)) + np.float32(np.sin(indices).sum())

    for batch in session.batches(36 * N_STEPS, global_batch=36, epochs=1, seed=1):
        momentum *= np.float32(0.5)
        momentum += batch.allreduce(gradient(batch.indices), recompute=gradient)
        w -= momentum
        time.sleep(pause_s)
        if pids and batch.batch_no >= 20:
            kept = Path(pids).parent / "kept"
            seen = any(name.endswith(until) for name in os.listdir(kept))
            if (seen and newest_named(Folder(str(kept)))) or batch.batch_no == 50:
                kill_all(pids)
    return float(w.sum(dtype=np.float64))


def slow(session: Any) -> float:
    """The same, with steps that give a busy machine the time to write."""
    return train(session, n=1000, pause_s=0.02)


def kill_all(pids: str) -> None:
    own = str(os.getpid())
    for pid in sorted(os.listdir(pids), key=lambda each: each == own):
        with suppress(ProcessLookupError):  # another one that ends all was first
            os.kill(int(pid), signal.SIGKILL)


def digest(result: bml.Result) -> str:
    assert result.report["samples"]["complete"]
    (found,) = set(result.report["digests"].values())
    return str(found)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_job_that_is_killed_while_it_writes_goes_on_with_the_same_bits(
    tmp_path: Path, transport: str
) -> None:
    n = 400_000
    (pids := tmp_path / "pids").mkdir()
    (kept := tmp_path / "kept").mkdir()
    dies = partial(train, n=n, until=UNFINISHED, pids=str(pids))
    with pytest.raises(bml.BmlError, match=ALL_DEAD):
        launch(dies, FABRIC, transport=transport, checkpoint=kept, every=5, keep=1)
    first = newest_whole(Folder(str(kept)))
    assert 6 <= first.steps < 50 + 50 // 4 + 5, "every fifth step is one of the checkpoints"
    lives = partial(train, n=n)
    again = launch(lives, FABRIC, transport=transport, checkpoint=kept, resume=kept, every=5, keep=1)
    assert digest(again) == digest(launch(lives, FABRIC, transport=transport)), "as if nothing had died"
    assert again.report["steps"] < N_STEPS
    shown = [each["checkpoints"] for each in again.report["metrics"].values()]
    assert all(each["whole"] > first.steps and not each["error"] for each in shown)


def whole(session: Any, **settings: Any) -> list[float]:
    """The same, with all parameters as the result."""
    train(session, **settings)
    found: list[float] = session._state.arrays()[1].tolist()
    return found


def test_other_fabrics_go_on_and_differ_by_the_order_of_additions_alone(tmp_path: Path) -> None:
    """Fewer servers, and more of them; 60 additions may each cost half of the 24th bit."""
    (pids := tmp_path / "pids").mkdir()
    kept = tmp_path / "kept"
    with pytest.raises(bml.BmlError, match=ALL_DEAD):
        launch(
            partial(train, n=100, until="0003-of-0004.bmlpart", pids=str(pids)),
            FABRIC,
            checkpoint=kept,
            every=10,
        )
    original = launch(partial(whole, n=100), FABRIC)
    assert np.abs(original.value).min() > 0
    for fabric in ("torus:3x1", "bcube:3x2"):
        other = launch(partial(whole, n=100), fabric, resume=kept)
        assert digest(other) != ""
        assert other.report["steps"] < N_STEPS
        assert np.allclose(other.value, original.value, rtol=4 * N_STEPS * 2**-24, atol=0)


def test_too_few_servers_leave_a_checkpoint(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with pytest.raises(bml.TooFewServers, match="only 3 of 4 servers are left"):
        launch(slow, FABRIC, checkpoint=kept, every=5, min_servers=4, faults="kill:3@step=40")
    key = newest_whole(Folder(str(kept)))
    assert 40 - 2 * (5 + 3) <= key.steps <= 40, "two intervals, each with the steps in which servers agree"
    again = launch(slow, FABRIC, resume=kept)
    assert digest(again) == digest(launch(slow, FABRIC))
    assert again.report["steps"] <= N_STEPS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "bml-test", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_and_the_older_checkpoint_stays(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(100 << 10))
    kept = small_disk / "kept"
    result = launch(partial(train, n=50_000), FABRIC, checkpoint=kept, every=5, keep=9)
    errors = [each["checkpoints"]["error"] for each in result.report["metrics"].values()]
    assert any("No space left on device" in error for error in errors), errors
    assert 0 < newest_whole(Folder(str(kept))).steps < N_STEPS
    assert digest(launch(partial(train, n=50_000), FABRIC, resume=kept)) == digest(result)


def endless(session: Any, pids: str) -> None:
    w = np.zeros(10)
    session.state(params=w)
    for step in session.steps(10**9):
        w += session.allreduce(np.ones(10), "avg")
        if step == 5:
            (Path(pids) / str(os.getpid())).touch()


def killed_command(kept: Path, script: Path, number: int, send: Callable[[int, int], None]) -> int:
    """Run a job as a command, and send it a signal when its servers train; returns its exit status."""
    command = [sys.executable, "-m", "bml", "run", str(script), "--launcher", "processes", "--fabric", FABRIC]
    command += ["--checkpoint", str(kept), "--every", "1000000"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(list(script.parent.glob("ready-*"))) == 4)
        send(process.pid, number)
        said = process.communicate(timeout=60)[1]
    assert f"is kept: go on with --resume {kept}" in said
    return process.returncode


ENDLESS = """
from pathlib import Path
import numpy as np

def train(session):
    w = np.zeros(10)
    session.state(params=w)
    for step in session.steps(10**9):
        w += session.allreduce(np.ones(10), "avg")
        if step == 5:
            Path(__file__).with_name(f"ready-{session.server}").touch()
"""


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg), (signal.SIGINT, os.killpg)],
    ids=["SIGTERM", "SIGTERM to all its processes", "Ctrl-C"],
)
def test_a_command_that_is_asked_to_end_leaves_a_checkpoint(tmp_path: Path, number: int, send: Any) -> None:
    (script := tmp_path / "endless.py").write_text(ENDLESS)
    assert killed_command(tmp_path / "kept", script, number, send) in (1, 143)
    assert newest_whole(Folder(str(tmp_path / "kept"))).steps >= 6


def test_a_second_interrupt_ends_a_job_whose_servers_do_not_leave(tmp_path: Path) -> None:
    """They are waited for 60 s after the first one."""
    (script := tmp_path / "stuck.py").write_text("import time\n" + ENDLESS + "            time.sleep(1000)\n")
    command = [sys.executable, "-m", "bml", "run", str(script), "--launcher", "processes", "--fabric", FABRIC]
    command += ["--checkpoint", str(tmp_path / "kept")]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 4)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert any("interrupt again to end it" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1
        assert psutil.wait_procs(family, timeout=30)[1] == []


def counted(session: Any) -> float:
    w = np.zeros(10)
    session.state(params=w)
    for _ in session.steps(10**9):
        return float(w[0])
    raise AssertionError


def test_a_cluster_that_goes_down_leaves_a_checkpoint(tmp_path: Path) -> None:
    """SIGTERM to all servers, of which the first checkpoint was never due."""
    (pids := tmp_path / "pids").mkdir()
    kept = tmp_path / "kept"
    job = bml.start(
        partial(endless, pids=str(pids)), FABRIC, launcher="processes", checkpoint=kept, every=10**6
    )
    with job:
        wait_for(lambda: len(os.listdir(pids)) == 4)
        for pid in os.listdir(pids):
            with suppress(ProcessLookupError):  # too few were left, so it has ended
                os.kill(int(pid), signal.SIGTERM)
        with pytest.raises(bml.BmlError):
            job.wait(60)
    key = newest_whole(Folder(str(kept)))
    assert key.n_parts == 1
    went_on = bml.launch(counted, FABRIC, launcher="processes", resume=kept)
    assert went_on.value >= 6
