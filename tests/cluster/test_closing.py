"""Ends of jobs that are disturbed: Ctrl-C comes again, and the process that forks the others is stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import commands
import jobs
import numpy as np
import psutil
import pytest

import bml
from bml.cluster.fleets.fleet import NoSpares, Reported
from bml.cluster.fleets.fork_server import ForkServer
from bml.cluster.fleets.processes import ProcessFleet
from bml.cluster.launcher.callbacks import Teller
from bml.cluster.launcher.running import Job
from bml.cluster.process.mail import Outbox
from bml.cluster.spec.ending import packed
from bml.cluster.spec.job import JobSpec, ServerReport

pytestmark = pytest.mark.timeout(60)

WITHIN_S = 30.0


class Fleet:
    """One that takes its time to close, and may fail to."""

    def __init__(self, failures: int = 0) -> None:
        self.spec = JobSpec("bcube:2x1")
        self.spares = NoSpares()
        self.closing, self.go = threading.Event(), threading.Event()
        self.failures = failures
        self.closed = 0

    def join(self, server: int, incarnation: int, give_up: threading.Event) -> None:
        raise AssertionError

    def ask(self, request: Any, patience: Any) -> dict[int, Any]:
        return {}

    def close(self) -> None:
        self.closing.set()
        assert self.go.wait(WITHIN_S)
        if self.failures:
            self.failures -= 1
            raise OSError("once")
        self.closed += 1


def job_of(fleet: Any) -> Job:
    return Job(fleet, fleet.spec, "processes", Teller(None))


def test_an_interrupted_close_goes_on_and_can_be_called_again() -> None:
    fleet = Fleet()
    job = job_of(fleet)

    def interrupt() -> None:
        assert fleet.closing.wait(WITHIN_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        job.close()
    assert fleet.closed == 0
    threading.Timer(0.05, fleet.go.set).start()
    job.close()
    assert fleet.closed == 1
    job.close()
    assert fleet.closed == 1


def test_what_close_raises_is_raised_and_it_can_be_called_again() -> None:
    fleet = Fleet(failures=1)
    fleet.go.set()
    job = job_of(fleet)
    with pytest.raises(OSError, match="once"):
        job.close()
    job.close()
    assert fleet.closed == 1


@pytest.mark.serial("to close waits for no thread that closes")
def test_a_function_that_is_told_may_close_the_job() -> None:
    fleet, told = Fleet(), threading.Event()
    fleet.go.set()

    def ends(now: dict[str, Any]) -> None:
        job.close()
        told.set()

    teller = Teller(ends)
    job = Job(fleet, fleet.spec, "processes", teller)  # type: ignore[arg-type]
    begun = time.monotonic()
    teller.tell({"term": 1, "epoch": 1})
    assert told.wait(WITHIN_S)
    assert time.monotonic() - begun < 0.5
    assert fleet.closed == 1


class Value:
    """One that says who reads it, and how often."""

    def __reduce__(self) -> Any:
        return threading.get_ident, ()


def test_values_are_read_once_by_the_thread_that_waits() -> None:
    """The one that follows the job runs nothing of the user's: reading a value may import for seconds."""
    fleet = Fleet()
    fleet.go.set()
    reports = {
        server: ServerReport(server, "done", packed(value), "", "NoneType", "", "", None, [], {})
        for server, value in ((0, Value()), (1, packed("as bytes")))
    }
    heard = [Reported(report) for report in reports.values()]
    fleet.wait = lambda timeout_s: [heard.pop()] if heard else []  # type: ignore[attr-defined]
    job = job_of(fleet)
    job._thread.start()
    for _ in range(2):
        assert job.wait(WITHIN_S).values == {0: threading.get_ident(), 1: packed("as bytes")}


SCRIPT = """
import numpy as np
def train(session):
    while True:
        session.allreduce(np.ones(3))
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("transport", "times"), [("tcp", 2), pytest.param("shm", 2, marks=pytest.mark.smoke), ("tcp", 6)]
)
def test_interrupts_leave_nothing(tmp_path: Path, transport: str, times: int) -> None:
    (tmp_path / "endless.py").write_text(SCRIPT)
    for folder in ("bml", "tmp"):
        (tmp_path / folder).mkdir(mode=0o700)
    shared = set(os.listdir("/dev/shm"))
    options = ["--launcher", "processes", "--fabric", "bcube:2x2", "--transport", transport]
    command = [sys.executable, "-m", "bml", "run", str(tmp_path / "endless.py"), *options]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    with commands.begun(*command, env=environment) as process:
        assert process.stdout is not None
        assert "view 1" in process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 10, "a fork server, a coordinator, four servers, each with its stand-in"
        for _ in range(times):
            commands.interrupt(process, signal.SIGINT)
            time.sleep(0.05)  # as a user does who presses it again
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "Traceback" not in stderr
        assert commands.running(family) == [], "the command ends last"
    assert [*(tmp_path / "bml").iterdir(), *(tmp_path / "tmp").iterdir()] == []
    assert set(os.listdir("/dev/shm")) == shared


NOT_CLOSED = f"""
import sys
import bml
{SCRIPT}
if __name__ == "__main__":
    bml.start(train, "bcube:2x1", launcher=sys.argv[1])
"""


@pytest.mark.real
@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_job_that_nobody_closes_ends_with_its_program(launcher: str, tmp_path: Path) -> None:
    """As after two interrupts of which the second comes before `close` has begun."""
    (tmp_path / "endless.py").write_text(NOT_CLOSED)
    (tmp_path / "run" / "bml").mkdir(mode=0o700, parents=True)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "RAY_USAGE_STATS_ENABLED": "0"}
    with commands.begun(sys.executable, str(tmp_path / "endless.py"), launcher, env=environment) as process:
        _, stderr = process.communicate(timeout=50)
        assert process.returncode == 0, stderr
        assert "Traceback" not in stderr
        assert "Started a local Ray instance" not in stderr, "its own has ended before the job"
    assert [*(tmp_path / "run" / "bml").iterdir()] == []


@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "status", "kind"),
    [(signal.SIGINT, 1, "KeyboardInterrupt"), (signal.SIGTERM, 143, "SystemExit")],
)
def test_an_interrupted_job_has_a_report_that_says_so(
    tmp_path: Path, number: int, status: int, kind: str
) -> None:
    (tmp_path / "endless.py").write_text(SCRIPT)
    report = tmp_path / "report.json"
    report.write_text('{"job": "an older one"}')
    options = ["--launcher", "processes", "--fabric", "bcube:2x2", "--report", str(report)]
    command = [sys.executable, "-m", "bml", "run", str(tmp_path / "endless.py"), *options]
    with commands.begun(*command) as process:
        assert process.stdout is not None
        assert "view 1" in process.stdout.readline()
        commands.interrupt(process, number)
        process.communicate(timeout=20)
    assert process.returncode == status
    said = json.loads(report.read_text())
    assert said["job"].startswith("bml-")
    assert isinstance(said["began_at_s"], float)
    assert said["version"] == metadata.version("bml")
    assert said["error"]["kind"] == kind


# --- a process that forks the others, and is stopped -------------------------------------------------


def the_fork_server() -> psutil.Process:
    (found,) = [each for each in psutil.Process().children() if "fork_server" in " ".join(each.cmdline())]
    return found


@pytest.mark.real
def test_a_job_ends_although_its_fork_server_is_stopped() -> None:
    before = jobs.children()

    def train(session: bml.Session) -> None:
        while True:
            session.allreduce(np.ones(3))

    job = bml.start(train, "bcube:2x1", launcher="processes", transport="tcp")
    fork_server = the_fork_server()
    family = fork_server.children()
    assert len(family) == 3
    family[0].suspend()  # it hears nobody
    fork_server.suspend()
    begun = time.monotonic()
    job.close()
    assert time.monotonic() - begun < WITHIN_S
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert jobs.children() == before


@pytest.mark.real
def test_a_fork_server_without_children_that_is_stopped_is_ended() -> None:
    before = jobs.children()
    fork_server = ForkServer(prints=False)
    the_fork_server().suspend()
    fork_server.close()
    assert jobs.children() == before


@pytest.mark.real
def test_a_death_is_dealt_with_although_the_fork_server_is_stopped() -> None:
    """Its connection ends; how it ended nobody can tell."""

    def train(session: bml.Session) -> int:
        steps = 0
        while 3 in session.contributors or not steps:
            steps += 1
            assert session.allreduce(np.ones(3))[0] == len(session.contributors)
            time.sleep(0.01)
        return len(session.contributors)

    with bml.start(train, "bcube:2x2", launcher="processes", transport="tcp") as job:
        assert isinstance(job._fleet, ProcessFleet)
        the_fork_server().suspend()
        job.inject("kill:3")
        result = job.wait(30)
    assert result.values == {0: 3, 1: 3, 2: 3}
    assert result.dead == {3: "its process is gone"}


@pytest.mark.real
def test_a_job_ends_although_its_fork_server_is_stopped_and_a_report_is_late() -> None:
    """The coordinator ends before the last report, and nobody can tell how; it had done its work."""

    def train(session: bml.Session) -> object:
        for _ in range(20):
            session.allreduce(np.ones(3))
            time.sleep(0.01)
        put = Outbox.put

        def late(outbox: Outbox, *message: Any) -> None:
            time.sleep(message[0] == "report")
            put(outbox, *message)

        if session.server == 0:
            Outbox.put = late  # type: ignore[method-assign]
        return session.server

    with bml.start(train, "bcube:2x2", launcher="processes", transport="tcp") as job:
        the_fork_server().suspend()
        result = job.wait(30)
    assert sorted(result.values) == [0, 1, 2, 3]
    assert not result.dead


# --- a launcher and a coordinator that are stopped for good ------------------------------------------

STOPPED = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import bml, test_closing
bml.launch(test_closing.outlives_all, "bcube:2x2", launcher="processes", transport="tcp", start_s=4.0,
           detect_s=0.5, faults=["freeze:coordinator@step=20"])
"""
GIVE_UP_S = 2 * 4.0


def outlives_all(session: bml.Session) -> None:
    for step in range(60):
        session.allreduce(np.ones(3))
        if (session.server, step) == (0, 10):
            launcher = psutil.Process().parents()[1]
            launcher.suspend()


@pytest.mark.real
def test_servers_end_although_launcher_and_coordinator_are_stopped_for_good() -> None:
    with commands.begun(sys.executable, "-c", STOPPED) as process:
        launcher = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while launcher.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (fork_server,) = launcher.children()
        family = fork_server.children()
        ended, left = psutil.wait_procs(family, timeout=GIVE_UP_S + 10)
        assert len(ended) == 4
        assert [each.status() for each in left] == [psutil.STATUS_STOPPED], "the coordinator"
        left[0].kill()
        launcher.resume()
        process.communicate(timeout=20)
    assert process.returncode == 0


# --- signals that come while it starts ---------------------------------------------------------------

STARTS = """
import signal, socket
from bml.cluster.fleets.fork_server import ForkServer
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
print("starts", flush=True)
fork_server = ForkServer(prints=False)
ours, theirs = socket.socketpair()
fork_server.fork(theirs, 30.0)
print("born", flush=True)
ours.close()
fork_server.close()
"""


@pytest.mark.slow
def test_signals_of_the_terminal_do_not_disturb_the_start() -> None:
    """They printed a traceback of Python's own start, and the job had no processes."""
    with commands.begun(sys.executable, "-c", STARTS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        born = threading.Event()

        def disturb() -> None:
            while not born.wait(0.002):
                for number in (signal.SIGINT, signal.SIGHUP):
                    os.killpg(process.pid, number)

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        try:
            assert process.stdout.readline() == "born\n"
        finally:
            born.set()
            disturbing.join()
        _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (0, "")
