"""What happens to a job is the same under both launchers: one program, run with each."""

from __future__ import annotations

from pathlib import Path

import commands
import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

_PROGRAM = """
import json, os, signal, sys, threading
import bml
import numpy as np

LAUNCHER, FOLDER = sys.argv[1:]
STOP = FOLDER + "/stop"


def arguments(session):
    import beside
    return [*sys.argv[1:], beside.VALUE]


def until(session):
    for _ in session.steps(10**9):
        if session.allreduce(np.array([os.path.exists(STOP)]).astype("i4"), op="max")[0]:
            return session.server


def left(snapshot):
    if snapshot["members"] == [0, 1]:
        two.set()


def main():
    found = {"arguments": bml.launch(arguments, "bcube:2x1", launcher=LAUNCHER).value}
    with bml.start(until, "bcube:3x1", launcher=LAUNCHER, on_change=left) as job:
        os.kill(job.status()["servers"][2]["process"], signal.SIGTERM)
        assert two.wait(60)
        open(STOP, "w").close()
        result = job.wait(60)
    found["left"] = [sorted(result.values), result.left[2], result.report["views"][-1]["reason"]]
    print(json.dumps(found))


two = threading.Event()
main()
"""


@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=pytest.mark.ray)])
def test_arguments_modules_and_notices_of_preemption(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    found = commands.found_by(_PROGRAM, tmp_path, launcher, within_s=150)
    assert found["arguments"] == [launcher, str(tmp_path), 7]
    survivors, why, reason = found["left"]
    assert survivors == [0, 1]
    assert "leaves: it got SIGTERM" in why
    assert "leaves: it got SIGTERM" in reason
