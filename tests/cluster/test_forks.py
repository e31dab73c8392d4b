"""Training functions that fork: their children neither hide a death nor disturb the job."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forking_beside_starts
import jobs
import numpy as np
import pytest

import bml
from bml.errors import UsageError
from bml.io import forks
from bml.sharedmem.status_page import PeerStatusPage, StatusPage

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

DETECT_S = 30.0
"""Silence tells after this time: a death of which is known sooner was seen, however busy the machine is."""
STEPS = 400
CHILD_S = 60


def by_python() -> int:
    """As most libraries do."""
    child = os.fork()
    if child == 0:
        time.sleep(CHILD_S)
        os._exit(0)
    return child


def by_multiprocessing() -> int:
    """As data loaders do."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(CHILD_S,))
    process.start()
    assert process.pid is not None
    return process.pid


def by_c() -> int:
    """As an extension does, of which Python does not hear: the child keeps all descriptors."""
    c = ctypes.PyDLL(None)
    child: int = c.fork()
    if child == 0:
        c.sleep(CHILD_S)
        c._exit(0)
    return child


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Path]:
    """Where the process id of the child is written; it is ended."""
    path = tmp_path / "child"
    yield path
    if path.exists():
        os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("fork", [by_python, by_multiprocessing, by_c])
def test_a_child_does_not_hide_the_death_of_its_server(
    fork: Callable[[], int], transport: str, child: Path
) -> None:
    def train(session: bml.Session) -> int:
        w = np.zeros(1000)
        session.state(params=w)
        for step in session.steps(STEPS):
            if (session.server, step) == (2, 50):
                child.write_text(str(fork()))
            time.sleep(0.002)
            w += session.allreduce(np.ones(1000))
        return int(w[0])

    result = jobs.launch(
        train, "bcube:2x2", faults=["kill:2@step=200"], transport=transport, detect_s=DETECT_S
    )
    os.kill(int(child.read_text()), 0)  # it lives
    gaps = {server: metrics["step_max_s"] for server, metrics in result.report["metrics"].items()}
    print("longest time between two commits:", gaps)
    assert sorted(gaps) == [0, 1, 3]
    assert max(gaps.values()) < DETECT_S
    assert "server 2 is dead" in result.report["views"][1]["reason"]
    assert result.dead[2] == "its process was killed by signal 9"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_children_that_end_in_any_way_leave_the_job_alone(transport: str) -> None:
    """They hold results that all read in place, call the runtime, raise, exit, return, get SIGTERM."""

    def train(session: bml.Session) -> list[int]:
        w, statuses, kept = np.zeros(100_000), [], None
        ready, say = os.pipe()
        session.state(params=w)
        for step in session.steps(STEPS):
            if session.server == 2 and step and step % 50 == 0:
                child = os.fork()
                if child == 0:
                    os.write(say, b"1" if step == 350 else b"")
                    return end(step, session)
                if step == 350:
                    assert os.read(ready, 1)  # Python drops signals that come in its fork
                    os.kill(child, signal.SIGTERM)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            kept = session.allreduce(np.ones(100_000), shared=True)
            w += kept
        assert (w == 4 * STEPS).all()
        return statuses

    def end(step: int, session: bml.Session) -> list[int]:
        match step:
            case 50:
                sys.exit(5)
            case 100:
                sys.exit()
            case 150:
                raise ValueError("of a child: nobody need hear of it")
            case 200:
                return []
            case 250:
                with pytest.raises(UsageError, match="forked"):
                    session.allreduce(np.ones(1))
            case 300:
                os._exit(7)
            case _:
                time.sleep(CHILD_S)
        return []

    result = jobs.launch(train, "bcube:2x2", transport=transport)
    assert sorted(result.values) == [0, 1, 2, 3]
    assert result.values[2] == [5, 0, 1, 0, 0, 7, -signal.SIGTERM]
    assert len(result.report["views"]) == 1


def test_what_a_server_starts_has_none_of_its_descriptors() -> None:
    """Not even if it asks for them: subprocesses with `close_fds=False`."""

    def train(session: bml.Session) -> str:
        said = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], close_fds=False, stdout=subprocess.PIPE, check=True
        )
        session.allreduce(np.ones(1))
        return said.stdout.decode()

    for said in jobs.launch(train, "bcube:2x1").values.values():
        assert "/dev/null" in said
        assert not {"socket:", "anon_inode:", "memfd:"} & {each.split("[")[0] for each in said.split()}, said


TRANSPORTS = {
    "shm": {"transport": "shm"},
    "tcp": {"transport": "tcp"},
    "zero-copy": {"transport": "auto", "algorithm": "bml"},
}


@pytest.mark.parametrize("how", TRANSPORTS)
def test_what_children_write_changes_nothing(how: str) -> None:
    """Forked before the first step, between steps, beside one, with results held, after the last loop."""

    def overwrite(arrays: list[np.ndarray]) -> None:
        child = os.fork()
        if child == 0:
            for array in arrays:
                if array.flags.writeable:
                    array[...] = 77
            arrays.clear()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    def train(session: bml.Session) -> list[float]:
        n, forks = 300_000, session.server == 1
        w, x, held = session.empty(n), session.empty(n), []
        w[:], x[:] = 0, 1
        session.state(params=w)
        if forks:
            overwrite([w, x])
        for step in session.steps(40):
            handle = session.allreduce_async(x)
            if forks and step % 3 == 0:
                overwrite([w, x, *held])
            total = handle.wait()
            if forks and step % 3 == 1:
                overwrite([w, x, total, *held])
            w += total
            x += 1
            held = [*held[-3:], total, session.allreduce(x, shared=True)]
        if forks:
            overwrite([w, x, *held])
        assert (x == 41).all()
        for number, array in enumerate(held[::-1]):
            assert (array == 4 * (41 - (number + 1) // 2)).all(), number
        return [float(w.min()), float(w.max())]

    result = jobs.launch(train, "bcube:2x2", **TRANSPORTS[how])
    assert list(result.values.values()) == [[4.0 * 820] * 2] * 4
    assert len(set(result.report["digests"].values())) == 1


def test_a_child_may_map_memory_before_what_was_shared_is_private() -> None:
    """Its allocators do, at times: that memory was overwritten, and the child died of it."""
    program = Path(__file__).with_name("occupying_child.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_child_does_not_let_go_of_results_that_its_parent_reads() -> None:
    page = StatusPage(b"x" * 32, "job", 0)
    entry = page.hold(3)
    assert entry is not None
    child = os.fork()
    if child == 0:
        page.release(entry)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert PeerStatusPage(0, page.address).held() == {3}
    page.close()


@pytest.mark.parametrize("kind", forking_beside_starts.STARTS)
def test_a_child_that_is_forked_while_a_process_is_started_holds_nothing_of_it(kind: str) -> None:
    """Or the start would last as long as the child, and no end of ours be noticed while it lives."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", forking_beside_starts.__file__, kind]
    held = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert len(held) >= forking_beside_starts.N_CHILDREN
    assert [each for each in held if len(each) != 1] == [], "it has its own pipe"


def test_what_fails_in_a_child_leaves_nothing_else_open() -> None:
    """One object that cannot be released must not keep the connections of the server."""

    class Fails:
        def forked(self) -> None:
            raise ValueError("of a child: nobody need hear of it")

    failing, (ours, theirs) = [Fails(), Fails()], socket.socketpair()
    forks.close_on_fork(ours)
    for each in failing:
        forks.on_fork(each)
    child = os.fork()
    if child == 0:
        theirs.close()
        time.sleep(CHILD_S)
        os._exit(0)
    try:
        ours.close()
        theirs.settimeout(CHILD_S)
        assert theirs.recv(1) == b"", "the child has its other end"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        theirs.close()
