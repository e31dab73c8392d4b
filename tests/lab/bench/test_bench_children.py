"""The processes of a benchmark: how they end is told, and none outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bml.lab.bench.children import Children
from bml.lab.bench.host import RankError

pytestmark = pytest.mark.timeout(60)


def failure_of(children: Children) -> str:
    """What `check` says once a process has ended."""
    with pytest.raises(RankError) as raised:  # noqa: PT012 (until it has ended)
        while True:
            children.check()
    children.close()
    return str(raised.value)


def test_the_last_lines_of_one_that_ended_are_told(tmp_path: Path) -> None:
    children = Children("gloo", tmp_path)
    children.start([sys.executable, "-c", "print('one'); print('two'); raise SystemExit(3)"])
    assert failure_of(children) == "gloo ended with status 3: one | two"


def test_one_that_cannot_start_is_told(tmp_path: Path) -> None:
    children = Children("openmpi", tmp_path)
    children.start([str(tmp_path / "mpirun")])
    assert failure_of(children) == "openmpi cannot start (No such file or directory): it printed nothing"


def test_one_thread_each_and_what_a_contender_adds(tmp_path: Path) -> None:
    children = Children("gloo", tmp_path)
    says = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['EXTRA']); raise SystemExit(1)"
    children.start([sys.executable, "-c", says], {"EXTRA": "more"})
    assert failure_of(children).endswith(": 1 more")


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_benchmark_that_is_killed(tmp_path: Path, number: int) -> None:
    program = (
        "import sys, time; from pathlib import Path; from bml.lab.bench.children import Children\n"
        "children = Children('gloo', Path(sys.argv[1]))\n"
        "children.start(['sh', '-c', 'setsid sleep 300 & sleep 300'])\n"
        "print(flush=True); time.sleep(300)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        bench = psutil.Process(process.pid)
        family: list[psutil.Process] = []
        while sum(each.name() == "sleep" for each in family) < 2:
            assert process.poll() is None
            with suppress(psutil.NoSuchProcess):
                family = bench.children(recursive=True)
        process.send_signal(number)
    assert psutil.wait_procs(family, timeout=30)[1] == []
