"""`bml run` as a user types it: what it prints, what it exits with, what it leaves when interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import commands
import psutil
import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

BML = [sys.executable, "-m", "bml"]
ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "examples" / "train_digits.py")
TRAIN = """
import numpy as np
def train(session):
    print("hello from", session.server)
    return {"sum": float(session.allreduce(np.ones(3))[0])}
def endless(session):
    while True:
        session.allreduce(np.ones(3))
def talk(session):
    for line in range(200):
        session.allreduce(np.ones(1))
        print("server", session.server, "has", "taken", "step", line)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(TRAIN)
    return str(tmp_path / "script.py")


def bml_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BML, "run", *arguments],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.smoke
def test_digits_with_faults_report_and_json(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    faults = ["--fault", "kill:4@step=20", "--fault", "blackhole:2/0@step=30"]
    done = bml_run(DIGITS, "--launcher", "processes", *faults, "--report", str(report), "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads(report.read_text())
    assert {"steps", "views", "digests", "samples", "metrics"} <= printed.keys()
    assert printed["steps"] == 70
    assert [view["epoch"] for view in printed["views"]] == [1, 2, 3]
    assert {"epoch", "members", "failures", "reason", "noticed_s", "recover_s"} <= printed["views"][0].keys()
    assert len(set(printed["digests"].values())) == 1
    assert printed["samples"]["complete"]
    assert printed["values"]["0"]["accuracy"] >= 0.95


def test_summary_for_people(script: str) -> None:
    done = bml_run(script, "--launcher", "processes", "--fabric", "bcube:2x2")
    assert done.returncode == 0, done.stderr
    for text in (
        "view 1: 4 servers (start)",
        "hello from 3",
        "steps committed: 1",
        "parameters: none were named with session.state, so nothing was compared",
        "sum 4",
    ):
        assert text in done.stdout, done.stdout
    quiet = bml_run(script, "--launcher", "processes", "--fabric", "bcube:2x2", "--quiet")
    assert "hello" not in quiet.stdout


def test_lines_that_servers_print_at_once_stay_whole(script: str) -> None:
    """With PYTHONUNBUFFERED, as containers set it, each word of a print would be a write of its own."""
    done = bml_run(f"{script}:talk", "--launcher", "processes", "--fabric", "bcube:2x2", PYTHONUNBUFFERED="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for server in range(4):
        said = [line for line in lines if line.startswith(f"server {server} ")]
        assert said == [f"server {server} has taken step {step}" for step in range(200)]


@pytest.mark.parametrize("name", ["queue.py", "topology.py", "my.train.py", "train", "with: colon.py"])
def test_a_script_may_be_called_as_others_are(name: str, tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("TEXT = 'beside'\n")
    (tmp_path / name).write_text("import queue\nfrom beside_it import TEXT\n" + TRAIN + "    assert TEXT\n")
    for target in (tmp_path / name, f"{tmp_path / name}:talk"):
        done = bml_run(str(target), "--launcher", "processes", "--fabric", "bcube:2x1", "--quiet")
        assert done.returncode == 0, done.stderr


def test_files_beside_a_script_may_be_called_as_modules_of_python(tmp_path: Path) -> None:
    """The launcher looks for modules beside the script last, and so do its processes, wherever they begin."""
    for name in ("queue", "json", "random", "socket", "numpy", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is another one')\n")
    (tmp_path / "train.py").write_text(TRAIN)
    command = [str(Path(sys.executable).with_name("bml")), "run", "train.py"]
    options = ["--launcher", "processes", "--fabric", "bcube:2x1", "--quiet"]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["missing.py"], "there is no file missing.py", marks=pytest.mark.smoke),
        (["SCRIPT:nothing"], "no function 'nothing'; it has train, endless"),
        (["SCRIPT", "--fault", "kill:99@step=1"], "no server 99"),
        (["SCRIPT", "--fault", "plan.yaml"], "there is no fault plan plan.yaml"),
        (["SCRIPT", "--launcher", "mpi"], "mpi"),
    ],
)
def test_bad_usage(script: str, arguments: list[str], message: str) -> None:
    done = bml_run(*[each.replace("SCRIPT", script) for each in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_fault_plan_of_a_file(script: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("- kill:3@t=0s\n")
    done = bml_run(script, "--launcher", "processes", "--fabric", "bcube:2x2", "--fault", str(plan))
    assert "lost server 3: its process was killed by signal 9" in done.stdout


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGINT, 1, "Aborted!"),
        (signal.SIGTERM, 143, "Ended by SIGTERM."),
        (signal.SIGHUP, 129, ""),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_every_signal_that_ends_a_command_leaves_nothing(
    script: str, number: int, status: int, says: str, tmp_path: Path
) -> None:
    """Neither a server that is frozen for good, nor one that is to be woken, nor what is to wake it."""
    shared = set(os.listdir("/dev/shm"))
    for folder in ("bml", "tmp"):
        (tmp_path / folder).mkdir(mode=0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    faults = ["--fault", "freeze:1@step=3", "--fault", "freeze:2@step=3,for=60s", "--min-servers", "1"]
    command = [*BML, "run", f"{script}:endless", "--launcher", "processes", "--fabric", "bcube:2x2", *faults]
    with commands.begun(*command, env=environment) as process:
        assert process.stdout is not None
        assert "view 1" in process.stdout.readline()
        line = "view 1"
        while line and ": 1 servers" not in line:  # both are missed, in one view or in two
            line = process.stdout.readline()
        assert line
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 11, (
            "servers, stand-ins, the coordinator, the fork server, and what is to wake one"
        )
        commands.interrupt(process, number)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert says in stderr
    assert psutil.wait_procs(family, timeout=30)[1] == []
    sockets = list((tmp_path / "bml").iterdir())
    assert len(sockets) == (number == signal.SIGKILL), "the next command that looks removes it"
    assert list((tmp_path / "tmp").iterdir()) == []
    assert set(os.listdir("/dev/shm")) == shared
