"""The launcher dies, alone or with all processes: the servers leave a checkpoint, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from jobs import wait_for

import bml
from bml.train.keeping.files import Folder
from bml.train.keeping.resuming import newest_whole

pytestmark = [pytest.mark.real, pytest.mark.timeout(100)]
FABRIC = "bcube:2x2"
ENDS_S = 30.0
"""Servers have ended by then: they are given 60 s, and take less than one."""
EMBEDDED = f"""
import sys
from pathlib import Path

import bml
import numpy as np


def train(session):
    w = np.zeros(10)
    session.state(params=w)
    for step in session.steps(10**9):
        w += session.allreduce(np.ones(10), "avg")
        if step == 5:
            Path(__file__).with_name(f"ready-{{session.server}}").touch()


if __name__ == "__main__":
    transport, *kept = sys.argv[1:]
    keeping = {{"checkpoint": kept[0], "every": 10**6}} if kept else {{}}
    bml.launch(train, "{FABRIC}", launcher="processes", transport=transport, prints=False, **keeping)
"""


def killed(folder: Path, number: int, send: Callable[[int, int], None], *arguments: str) -> float:
    """Run the program, and send it a signal when its servers train; returns how long they took to end."""
    (script := folder / "embedded.py").write_text(EMBEDDED)
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(list(folder.glob("ready-*"))) == 4, 40.0)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 6, "a fork server, four servers and a coordinator"
        began = time.monotonic()
        send(process.pid, number)
        assert process.wait(10) == -number
    assert psutil.wait_procs(family, ENDS_S)[1] == []
    return time.monotonic() - began


def places(session: bml.Session) -> tuple[float, int]:
    """The value of the state that a job goes on from, and the step of its loop."""
    w = np.zeros(10)
    session.state(params=w)
    for step in session.steps(10**9):
        return float(w[0]), step
    raise AssertionError


@pytest.mark.parametrize(
    ("number", "send", "transport"),
    [(signal.SIGTERM, os.killpg, "tcp"), (signal.SIGKILL, os.kill, "shm")],
    ids=["SIGTERM to all its processes", "SIGKILL of the launcher"],
)
def test_an_embedded_job_leaves_a_checkpoint(
    tmp_path: Path, number: int, send: Callable[[int, int], None], transport: str
) -> None:
    kept = tmp_path / "kept"
    killed(tmp_path, number, send, transport, str(kept))
    key = newest_whole(Folder(str(kept)))
    assert key.n_parts == 1
    went_on = bml.launch(places, FABRIC, launcher="processes", resume=kept, prints=False)
    value, step = went_on.value
    assert value == step, "each step adds one"
    assert 6 <= step <= key.steps


@pytest.mark.serial("all end at once, in less than the patience of servers without a coordinator")
def test_without_checkpoints_all_end_at_once(tmp_path: Path) -> None:
    assert killed(tmp_path, signal.SIGKILL, os.kill, "tcp") < 5.0
