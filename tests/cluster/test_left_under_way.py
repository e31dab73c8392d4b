"""What training functions leave in threads, executors, exit handlers and files is done before a job ends."""

from __future__ import annotations

import atexit
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

KEPT: list[Any] = []
"""Holds what the programs open, as a global variable of a user's would."""


def leaving(folder: str, fails: bool = False) -> Any:
    """A program of some steps that leaves work of each kind under way on every server."""

    def train(session: bml.Session) -> str:
        def save(how: str) -> None:
            time.sleep(0.3)
            (Path(folder) / f"{how}-{session.server}").write_text("whole")

        w = np.zeros(3)
        session.state(w=w)
        for _ in session.steps(3):
            w += session.allreduce(np.ones(3))
        atexit.register(save, "at exit")
        threading.Thread(target=save, args=("thread",)).start()
        executor = ThreadPoolExecutor(1)
        for name in ("first", "second"):
            executor.submit(save, name)
        ThreadPoolExecutor(1).submit(save, "forgotten")
        file = (Path(folder) / f"file-{session.server}").open("w")
        file.write("whole")
        KEPT.append((executor, file))
        if fails and session.server == 1:
            raise ValueError("the last epoch is bad")
        return "well"

    return train


def left(folder: Path, server: int) -> set[str]:
    return {
        path.name.rpartition("-")[0] for path in folder.glob(f"*-{server}") if path.read_text() == "whole"
    }


ALL = {"at exit", "thread", "first", "second", "forgotten", "file"}


@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_job_ends_when_what_its_functions_left_under_way_is_done(launcher: str, tmp_path: Path) -> None:
    result = bml.launch(leaving(str(tmp_path)), "bcube:3x1", launcher=launcher, detect_s=5, prints=False)
    assert result.values == dict.fromkeys(range(3), "well")
    of_ray = {"at exit"} if launcher == "ray" else set()  # Ray may end its workers without exit handlers
    for server in range(3):
        assert left(tmp_path, server) - of_ray == ALL - of_ray


class Begins:
    """Something of a training function that begins a thread of an executor where it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin, (self.path,)


def _begin(path: Path) -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1)
    executor.submit(path.exists).result()
    return executor


def test_what_began_while_the_function_was_loaded_is_waited_for(tmp_path: Path) -> None:
    def train(session: bml.Session, executor: Any) -> None:
        def save() -> None:
            time.sleep(0.3)
            (tmp_path / f"loaded-{session.server}").write_text("whole")

        session.allreduce(np.ones(3))
        executor.submit(save)

    bml.launch(partial(train, executor=Begins(tmp_path)), "bcube:3x1", launcher="processes", detect_s=5)
    assert [left(tmp_path, server) for server in range(3)] == [{"loaded"}] * 3


def test_after_an_error_the_rest_is_done_as_well(tmp_path: Path) -> None:
    with pytest.raises(bml.TrainingError, match="the last epoch is bad"):
        bml.launch(leaving(str(tmp_path), fails=True), "bcube:3x1", launcher="processes", detect_s=5)
    assert left(tmp_path, 1) == ALL


def test_a_thread_that_never_ends_keeps_no_job_whose_function_failed() -> None:
    def train(session: bml.Session) -> None:
        session.allreduce(np.ones(3))
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("the first epoch is bad")

    with pytest.raises(bml.TrainingError, match="the first epoch is bad"):
        bml.launch(train, "bcube:3x1", launcher="processes", detect_s=5)


def test_it_is_said_for_which_thread_a_job_waits(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    go = tmp_path / "go"

    def train(session: bml.Session) -> None:
        def upload() -> None:
            while not go.exists():
                time.sleep(0.01)

        session.allreduce(np.ones(3))
        if session.server == 2:
            threading.Thread(target=upload, name="upload").start()

    with bml.start(train, "bcube:3x1", launcher="processes", detect_s=5) as job:
        said = ""
        while "for thread upload" not in said:
            said += capfd.readouterr().err
            time.sleep(0.05)
        go.touch()
        assert "the training function of server 2 has returned" in said
        assert sorted(job.wait(60).values) == [0, 1, 2]
