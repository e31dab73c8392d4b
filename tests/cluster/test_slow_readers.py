"""Whoever does not read, callbacks, terminals, the launcher itself: failures are recovered meanwhile.

The coordinator's socket to the launcher has room for a few snapshots only, so that it is full at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.cluster.fleets import processes
from bml.cluster.launcher import running
from bml.errors import InvariantError

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

RECOVERED_S = 3.0
"""From a failure to the next commit, at the default detect_s."""
STEPS, FREEZES = 600, "freeze:2@step=300,for=12s"
FOLDER = str(Path(__file__).parent)


def small_socketpair(*which: int, pair: Any = socket.socketpair) -> tuple[socket.socket, socket.socket]:
    ours, theirs = pair(*which)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return ours, theirs


@pytest.fixture(autouse=True)
def few_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.socket, "socketpair", small_socketpair)


def train(session: bml.Session, steps: int = STEPS, n_servers: int = 0) -> int:
    w = np.zeros(10)
    session.state(params=w)
    for step in session.steps(steps):
        time.sleep(0.002)
        if step > STEPS:
            jobs.pace(session, n_servers)
        w += session.allreduce(np.ones(10))
    return int(w[0])


def recovered_s(report: dict[str, Any]) -> float:
    """Check the report; returns the longest time between two commits of a survivor, in seconds."""
    gaps = {server: metrics["step_max_s"] for server, metrics in report["metrics"].items()}
    print("longest time between two commits:", gaps)
    assert sorted(int(server) for server in gaps) == [0, 1, 3]
    assert "server 2 is silent" in report["views"][1]["reason"]
    assert report["steps"] == STEPS
    return float(max(gaps.values()))


def launch(on_change: Callable[[dict[str, Any]], None]) -> bml.Result:
    return jobs.launch(train, "bcube:2x2", faults=[FREEZES], on_change=on_change)


@pytest.mark.serial("recovery in a second or so, whatever others do")
def test_a_slow_callback_stops_nobody_and_hears_of_every_view() -> None:
    views = []

    def slow(now: dict[str, Any]) -> None:
        time.sleep(0.3)
        views.append(now["epoch"])

    assert recovered_s(launch(slow).report) < RECOVERED_S
    assert {1, 2} <= set(views)
    assert views == sorted(views)


@pytest.mark.serial("recovery in a second or so, whatever others do")
def test_a_callback_that_never_returns_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_TOLD_S", 0.1)
    monkeypatch.setattr(running, "_ENDED_TOLD_S", 0.1)
    for_ever = threading.Event()
    try:
        assert recovered_s(launch(lambda now: for_ever.wait() and None).report) < RECOVERED_S
    finally:
        for_ever.set()


def test_what_a_callback_raises_ends_the_job() -> None:
    def fails(now: dict[str, Any]) -> None:
        raise ZeroDivisionError("of the user's")

    begun, children = time.monotonic(), jobs.children()
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        launch(fails)
    assert time.monotonic() - begun < 30
    assert jobs.children() == children


# --- launchers that stand still ----------------------------------------------------------------------

_HEAD = f"""
import json, os, sys
sys.path.insert(0, {FOLDER!r})
import test_slow_readers as slow
from bml.cluster.fleets import processes
processes.socket.socketpair = slow.small_socketpair
"""
LAUNCHER = f"""{_HEAD}
print(os.getpid(), flush=True)
begun = lambda now: now["step"] > 2 and print("runs", flush=True)
result = slow.jobs.launch(slow.train, "bcube:2x2", faults=[slow.FREEZES], on_change=begun)
print(json.dumps(result.report, default=str))
"""
COMMAND = f"""{_HEAD}
from bml.cli import main
sys.argv = ["bml", "run", *sys.argv[1:]]
main()
"""


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes_started = []

    def start(program: str, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program, *arguments], text=True, **settings)
        processes_started.append(process)
        return process

    yield start
    for process in processes_started:
        process.kill()
        process.wait()


@pytest.mark.serial("recovery in a second or so, whatever others do")
def test_a_launcher_that_is_stopped_stops_nobody(started: Any) -> None:
    with started(LAUNCHER, stdout=subprocess.PIPE).stdout as said:
        launcher = int(said.readline())
        assert said.readline() == "runs\n"
        os.kill(launcher, signal.SIGSTOP)
        time.sleep(6)  # the job is over by then
        os.kill(launcher, signal.SIGCONT)
        while (report := said.readline()) == "runs\n":
            pass
    assert recovered_s(json.loads(report)) < RECOVERED_S


@pytest.mark.serial("recovery in a second or so, whatever others do")
def test_a_console_that_nobody_reads_stops_nobody(started: Any, tmp_path: Path) -> None:
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(f"import sys; sys.path.insert(0, {FOLDER!r})\nfrom test_slow_readers import train\n")
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    assert os.write(write, bytes(4096)) == 4096  # it is full
    os.set_blocking(write, True)
    options = ["--fabric", "bcube:2x2", "--launcher", "processes", "--transport", "tcp", "--fault", FREEZES]
    command = started(COMMAND, str(script), *options, "--report", str(report), stdout=write)
    os.close(write)
    deadline = time.monotonic() + 60
    while not report.exists() or not report.read_text().endswith("}"):
        assert command.poll() is None
        assert time.monotonic() < deadline, "the job does not end"
        time.sleep(0.05)
    assert recovered_s(json.loads(report.read_text())) < RECOVERED_S
    with os.fdopen(read) as shown:
        assert "steps committed: 600" in shown.read()
    assert command.wait() == 0


# --- servers that are started beside -----------------------------------------------------------------


@pytest.mark.serial("recovery in a second or so, whatever others do")
def test_a_coordinator_that_dies_while_a_server_is_started_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And failures are recovered from, though the start takes as long as it likes."""
    starting, go = threading.Event(), threading.Event()
    contact = processes._contact

    def slowly(child: Any, server: int, deadline: float, give_up: Any = None) -> Any:
        if give_up is not None:
            starting.set()
            assert go.wait(60)
        return contact(child, server, deadline, give_up)

    monkeypatch.setattr(processes, "_contact", slowly)
    settings: dict[str, Any] = {"launcher": "processes", "transport": "tcp", "min_servers": 2}
    with bml.start(lambda session: train(session, 3 * STEPS, 3), "bcube:2x2", **settings) as job:
        job.inject("leave:1")
        while 1 in job.status()["members"]:
            assert job.running
            time.sleep(0.02)
        job.inject("join:1")
        assert starting.wait(30)
        job.inject("coordinator")
        job.inject("kill:3")
        while job.status()["epoch"] < 3:
            assert job.running
            time.sleep(0.02)
        go.set()
        result = job.wait(60)
    gaps = {server: metrics["step_max_s"] for server, metrics in result.report["metrics"].items()}
    assert {0, 1, 2} == set(gaps)
    assert max(gaps.values()) < RECOVERED_S


# --- servers that never come in ----------------------------------------------------------------------


def test_a_joiner_with_an_error_of_the_runtime_is_started_again(tmp_path: Path) -> None:
    failed = tmp_path / "failed"

    def fails_once(session: bml.Session) -> int:
        if session.joins and not failed.exists():
            failed.touch()
            raise InvariantError("step 15 submitted, 14 is next")
        return train(session, 3 * STEPS, 4)

    result = jobs.launch(fails_once, "bcube:2x2", faults=["kill:3@step=100"], rejoin=True)
    assert failed.exists()
    assert sorted(result.values) == [0, 1, 2, 3]
    assert result.dead == {}


def go_on(session: bml.Session, over: Path) -> int:
    """Steps until the file is there, which one server sees for all."""
    while not session.allreduce(np.array([over.exists()]).astype(np.int32), op="max")[0]:
        time.sleep(0.01)
    return 1


def until_lost(train: Any, why: str, over: Path) -> bml.Result:
    """A job that loses server 3 and goes on until its launcher has said why this does not come again."""
    settings: dict[str, Any] = {"launcher": "processes", "transport": "tcp", "rejoin": True}
    with bml.start(train, "bcube:2x2", faults=["kill:3@step=10"], **settings) as job:
        jobs.wait_for(lambda: why in job.status()["lost"].get(3, ""))
        over.touch()
        return job.wait(30)


def test_a_joiner_whose_training_function_raises_is_not_started_again(tmp_path: Path) -> None:
    over, starts = tmp_path / "over", tmp_path / "starts"
    starts.mkdir()

    def fails(session: bml.Session) -> int:
        if session.joins:
            (starts / str(time.time_ns())).touch()
            raise ValueError("no data here")
        return go_on(session, over)

    result = until_lost(fails, "no data here", over)
    assert sorted(result.values) == [0, 1, 2]
    assert "no data here" in result.dead[3]
    assert len(list(starts.iterdir())) == 1


def test_a_joiner_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    over, starts = tmp_path / "over", tmp_path / "starts"
    starts.mkdir()

    def dies(session: bml.Session) -> int:
        if session.joins:
            (starts / str(time.time_ns())).touch()
            os._exit(3)
        return go_on(session, over)

    result = until_lost(dies, "started 3 times", over)
    assert sorted(result.values) == [0, 1, 2]
    assert len(list(starts.iterdir())) == 3
    assert result.dead[3].startswith("its process exited with status 3; it was started 3 times within 60 s")
