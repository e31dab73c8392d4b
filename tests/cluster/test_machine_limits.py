"""A job that its machine does not let run says why: no more processes, no loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bml
from bml.errors import FabricError
from bml.fabric import namespace
from bml.io.limits import PROCESS_LIMIT, check_loopback, is_process_limit

CONTROLLER = Path("/sys/fs/cgroup/pids")
SCRIPT = """
import numpy as np

def train(session):
    w = np.zeros(10)
    session.state(params=w)
    for _ in session.steps(20):
        w += session.allreduce(np.ones(10))
    return float(w[0])
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose processes are counted; it is removed."""
    if not (os.geteuid() == 0 and os.access(CONTROLLER / "tasks", os.W_OK)):
        pytest.skip(f"this machine lets no control group be made in {CONTROLLER}")
    group = CONTROLLER / f"bml-test-{os.getpid()}"
    group.mkdir()
    yield group
    group.rmdir()


def run_in(group: Path, most: int, *command: str) -> subprocess.CompletedProcess[str]:
    (group / "pids.max").write_text(str(most))
    enter = f"open({str(group / 'tasks')!r}, 'w').write(str(os.getpid()))"
    program = f"import os, sys; {enter}; os.execv(sys.argv[1], sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.real
@pytest.mark.timeout(300)
def test_whatever_the_limit_is_the_job_ends_or_names_it(group: Path, tmp_path: Path) -> None:
    (script := tmp_path / "tiny.py").write_text(SCRIPT)
    ended = named = 0
    for most in (6, 13, 19, 26, 60):
        done = run_in(
            group, most, "-m", "bml", "run", str(script), "--launcher", "processes", "--fabric", "bcube:2x2"
        )
        print(most, done.returncode, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr
        if done.returncode == 0:
            ended += 1
        else:
            named += "pids.max" in done.stderr
            assert "pids.max" in done.stderr
        assert (group / "tasks").read_text() == "", "nothing is left behind"
    assert ended
    assert named


FORKS = """
import socket
from bml.cluster.fleets.fork_server import ForkServer
from bml.errors import StartError

server = ForkServer(prints=False)
ends, made = [], []
try:
    while True:
        ours, theirs = socket.socketpair()
        ends.append(ours)
        made.append(server.fork(theirs, 20.0))
except StartError as error:
    print(error)
print(len(made) > 2, [server.has_ended(each) for each in made] == [False] * len(made))
server.close()
"""


@pytest.mark.real
@pytest.mark.timeout(90)
def test_a_process_that_cannot_be_forked_costs_no_other_one(group: Path) -> None:
    """A newcomer that cannot start; the fork server ended, and all servers with it."""
    done = run_in(group, 12, "-c", FORKS)
    assert (done.stdout.splitlines(), done.stderr) == ([PROCESS_LIMIT, "True True"], "")


@pytest.mark.real
@pytest.mark.timeout(90)
def test_a_job_without_loopback_says_so_at_once() -> None:
    """Its servers waited for each other for a minute, and none was to blame."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace is made by root")
    name = f"bml-no-loopback-{os.getpid()}"
    namespace.create(name)
    try:
        with pytest.raises(FabricError, match=r"127\.0\.0\.1 cannot be reached here.*: ip link set lo up"):
            namespace.inside(name, lambda: bml.start(print, "bcube:2x1", launcher="processes"))
    finally:
        namespace.remove(name)
    check_loopback()


def test_how_python_says_it_is_known() -> None:
    assert is_process_limit(RuntimeError("can't start new thread"))
    assert not is_process_limit(BlockingIOError(11, "Resource temporarily unavailable")), "of any socket"
    assert not is_process_limit(RuntimeError("of the user's"))
    assert not is_process_limit(FileNotFoundError(2, "No such file"))
