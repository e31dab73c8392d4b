"""A training ends as it would if nobody can read what the command, or the servers, print."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

Where = Callable[[], tuple[int, Callable[[], Any]]]
STEPS = 40
TRAIN = f"""
import sys, time
import numpy as np
def train(session):
    w = np.zeros(3)
    session.state(w=w)
    for step in session.steps({STEPS}):
        time.sleep(0.01)
        w += session.allreduce(np.ones(3))
        print("server", session.server, "has taken a step …")
        print("and says so here", file=sys.stderr)
    return float(w[0])
"""


def closed_pipe() -> tuple[int, Callable[[], Any]]:
    read, write = os.pipe()

    def leave() -> None:
        os.read(read, 1)
        os.close(read)

    return write, leave


def full() -> tuple[int, Callable[[], Any]]:
    return os.open("/dev/full", os.O_WRONLY), lambda: None


def terminal() -> tuple[int, Callable[[], Any]]:
    """One that is nobody's controlling terminal: no signal says that it goes."""
    ours, theirs = pty.openpty()

    def leave() -> None:
        os.read(ours, 1)
        os.close(ours)

    return theirs, leave


def check(launcher: str, where: Where, form: list[str], folder: Path) -> None:
    """Run a training with a fault whose output nobody reads: it must end as with a reader."""
    script, report = folder / "script.py", folder / "report.json"
    script.write_text(TRAIN)
    options = ["--launcher", launcher, "--fabric", "bcube:2x2", "--fault", "kill:3@step=30", *form]
    command = [sys.executable, "-m", "bml", "run", str(script), *options, "--report", str(report)]
    write, leave = where()
    process = subprocess.Popen(command, stdout=write, stderr=write, start_new_session=True)
    os.close(write)
    leave()
    status = process.wait(90)
    found = json.loads(report.read_text())
    assert found["steps"] == STEPS
    assert [len(view["members"]) for view in found["views"]] == [4, 3]
    assert len(set(found["values"].values())) == 1
    assert "error" not in found
    assert status == (1 if form else 0), "an answer that was asked for, and could not be given, is an error"


@pytest.mark.real
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("where", [closed_pipe, full, terminal])
def test_the_training_ends_as_with_a_reader(where: Where, form: list[str], tmp_path: Path) -> None:
    check("processes", where, form, tmp_path)


@pytest.mark.ray
@pytest.mark.parametrize("where", [closed_pipe, terminal])
def test_the_training_ends_as_with_a_reader_on_ray(where: Where, tmp_path: Path) -> None:
    check("ray", where, [], tmp_path)
