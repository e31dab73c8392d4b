"""What a training function starts with multiprocessing: daemonic children end with their server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import commands
import jobs
import numpy as np
import psutil
import pytest

import bml

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

HERE = Path(__file__).parent
CHILD_S = 60
#: From the end of a job to that of the last child, in seconds; the children end before their server does.
ENDED_S = 10.0


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(CHILD_S)


def children(how: str, folder: Path) -> None:
    """Start some of this kind, and write down which."""
    context = multiprocessing.get_context("fork")
    match how:
        case "daemons":
            for target, arguments in ((time.sleep, (CHILD_S,)), (stubborn, ())):
                context.Process(target=target, args=arguments, daemon=True).start()
        case "pool":
            pool = context.Pool(2)
            pool.apply(os.getpid)
            globals()["kept"] = pool  # as a training function's module may keep it
        case "manager":
            globals()["kept"] = context.Manager()
        case "other":
            context.Process(target=time.sleep, args=(CHILD_S,)).start()
    for child in psutil.Process().children():
        if not any("stand_in_process" in word for word in child.cmdline()):  # that is the server's
            (folder / str(child.pid)).touch()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for child in noted(tmp_path):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def noted(folder: Path) -> list[psutil.Process]:
    """The children that live."""
    found = []
    for path in folder.iterdir():
        with suppress(psutil.NoSuchProcess, ValueError):
            found.append(psutil.Process(int(path.name)))
    return found


@pytest.mark.parametrize("how", ["daemons", "pool", "manager"])
def test_what_is_daemonic_does_not_outlive_the_job(how: str, folder: Path) -> None:
    def train(session: bml.Session) -> None:
        if session.server == 1:
            children(how, folder)
        session.allreduce(np.ones(1))

    jobs.launch(train, "bcube:2x1")
    assert list(folder.iterdir())
    assert psutil.wait_procs(noted(folder), timeout=ENDED_S)[1] == []


def test_a_training_function_that_raises_leaves_no_daemons(folder: Path) -> None:
    def train(session: bml.Session) -> None:
        children("daemons", folder)
        session.allreduce(np.ones(1))
        raise ValueError("of the user's")

    with pytest.raises(bml.TrainingError):
        jobs.launch(train, "bcube:2x1")
    assert list(folder.iterdir())
    assert psutil.wait_procs(noted(folder), timeout=ENDED_S)[1] == []


def test_a_child_that_is_no_daemon_goes_on_and_the_job_does_not_wait_for_it(folder: Path) -> None:
    def train(session: bml.Session) -> None:
        if session.server == 1:
            children("other", folder)
        session.allreduce(np.ones(1))

    begun = time.monotonic()
    jobs.launch(train, "bcube:2x1")
    assert time.monotonic() - begun < 30
    (child,) = noted(folder)
    assert child.status() != psutil.STATUS_ZOMBIE


def endless(folder: Path) -> Callable[[bml.Session], None]:
    def train(session: bml.Session) -> None:
        children("daemons", folder)
        while True:
            session.allreduce(np.ones(1))

    return train


def test_a_job_that_is_ended_early_leaves_no_daemons(folder: Path) -> None:
    with bml.start(endless(folder), "bcube:2x1", launcher="processes", transport="tcp") as job:
        while job.status()["servers"].get(0, {}).get("step", 0) < 3:
            assert job.running
        assert len(noted(folder)) == 4
    assert psutil.wait_procs(noted(folder), timeout=ENDED_S)[1] == []


def test_a_launcher_that_is_killed_leaves_no_daemons_and_no_stopped_server(folder: Path) -> None:
    program = (
        f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}\n"
        "import pathlib, bml, test_children as t\n"
        f"train = t.endless(pathlib.Path({str(folder)!r}))\n"
        "begun = lambda now: now['step'] > 2 and print('runs', flush=True)\n"
        "bml.launch(train, 'bcube:2x1', launcher='processes', transport='tcp', on_change=begun)\n"
    )
    with commands.begun(sys.executable, "-c", program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        family = psutil.Process(process.pid).children(recursive=True)
        daemons = noted(folder)
        assert len(daemons) == 4
        server = next(each for each in family if each.pid == daemons[0].ppid())
        server.suspend()  # which hears nothing, and whose children are not ended either
        theirs = {each.pid for each in server.children()}
        process.kill()
        process.wait(20)
        left = psutil.wait_procs([each for each in family if each.pid not in theirs], timeout=30)[1]
        assert left == []
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()  # the children of the stopped server may hold the other end
