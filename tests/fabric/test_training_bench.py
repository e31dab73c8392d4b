"""`bml bench train` on emulated wires: nobody beats them, sums are right, a server dies, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import commands
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.cluster.launcher import jobsocket
from bml.fabric import GOODPUT, namespace
from bml.lab.bench.training import replay as replayed
from bml.lab.bench.training import running
from bml.pytest_plugin import BringUp

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

LAYERS = [
    {"name": "first", "parameters": 60_000, "forward_s": 0.01, "backward_s": 0.02},
    {"name": "second", "parameters": 200_000, "forward_s": 0.01, "backward_s": 0.02},
]
NBYTES, COMPUTE_S, RATE_BIT = 4 * 260_000, 0.06, 100e6
QUICK = (
    *("--fabric", "bcube:2x2", "--rate", "100mbit", "--bucket", "100KB"),
    *("--iterations", "2", "--turns", "1"),
)


@pytest.fixture
def model(tmp_path: Path, emulated_fabric: BringUp) -> str:
    """A small model; skips the test where no fabric can be emulated."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(LAYERS))
    return str(path)


def train(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["bench", "train", *arguments])


def our_namespaces(pid: int) -> list[str]:
    return [name for name in namespace.names() if name.startswith(f"train{pid}")]


def test_rows_of_real_trainings_and_a_kill(model: str) -> None:
    jobsocket.folder()  # of this user: it stays
    before = set(Path(tempfile.gettempdir()).iterdir()), psutil.Process().children(recursive=True)
    result = train("--model", model, *QUICK, "--against", "ring@switch:4", "--fail", "server:3@5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["scale"], found["nbytes"], found["steps"]) == ("1", NBYTES, 2)
    own, ring = found["rows"]
    assert [(each["who"], each["fabric"]) for each in (own, ring)] == [
        ("bml", "bcube:2x2"),
        ("ring", "switch:4"),
    ]
    one_nic_s = 2 * 3 / 4 * NBYTES / (RATE_BIT / 8 * GOODPUT)
    for each, n_nics in ((own, 2), (ring, 1)):
        assert each["gst_s"] > 0.95 * one_nic_s / n_nics, "wires of this rate cannot be faster"
        assert each["iteration_s"] >= COMPUTE_S + 0.95 * one_nic_s / n_nics
        assert each["predicted_s"] == pytest.approx(COMPUTE_S + each["predicted_gst_s"], abs=1e-5)
    assert ring["reduction"] == pytest.approx(1 - own["gst_s"] / ring["gst_s"], abs=1e-3)
    (failed,) = found["failures"]
    assert (failed["failures"], failed["iteration"], failed["survivors"]) == (["server:3"], 5, 3)
    assert failed["after_s"] > COMPUTE_S * 4 / 3, "three servers share the work of four"
    assert failed["predicted_after_s"] > COMPUTE_S * 4 / 3
    assert our_namespaces(os.getpid()) == []
    assert psutil.Process().children(recursive=True) == before[1]
    assert set(Path(tempfile.gettempdir()).iterdir()) <= before[0]


def test_a_wrong_sum_is_an_error_and_no_row(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(work: Any, session: Any) -> Any:
        session.allreduce(np.ones(3))
        return {**replayed.replay(work, session), "wrong": 1}

    monkeypatch.setattr(running, "replay", one_more)
    result = train("--model", model, *QUICK, "--against", "")
    assert result.exit_code == 1
    assert "4 elements of sums were wrong" in result.stderr
    assert our_namespaces(os.getpid()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_interrupt_and_termination_leave_nothing(
    model: str, tmp_path: Path, number: int, status: int
) -> None:
    command = [sys.executable, "-m", "bml", "bench", "train", "--model", model, *QUICK, "--iterations", "500"]
    (tmp_path / "tmp").mkdir()
    with commands.begun(*command, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}) as process:
        assert process.stderr is not None
        while "of iterations" not in process.stderr.readline():  # the fabrics are up
            assert process.poll() is None
        family = _with_servers(process.pid)
        assert our_namespaces(process.pid)
        commands.interrupt(process, number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert our_namespaces(process.pid) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def _with_servers(pid: int) -> list[psutil.Process]:
    """The processes below a command, once its first job has some."""
    while True:
        family = psutil.Process(pid).children(recursive=True)
        if len(family) > 4:
            return family
