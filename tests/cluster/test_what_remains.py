"""What is found of a training function's work in this process, and what that does to other threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from bml.cluster.process.remaining import Remaining

FORKED = """
import atexit, weakref
from bml.cluster.fleets.fork_server import _forget_exit_handlers
class Thing: pass
inherited, own = Thing(), Thing()
weakref.finalize(inherited, print, "of the parent")
atexit.register(print, "of the parent, too")
_forget_exit_handlers()
weakref.finalize(own, print, "its own")
"""


def test_a_forked_process_runs_its_own_finalizers_and_none_of_its_parent() -> None:
    """`weakref.finalize`, and with it every TemporaryDirectory, has one exit handler for all."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert done.stdout == "its own\n"


@contextmanager
def making_tuples(error: list[BaseException]) -> Iterator[None]:
    """Make tuples of unknown length in another thread, as a server's loop does for each step."""
    over = threading.Event()

    def run() -> None:
        try:
            while not over.is_set():
                assert len(tuple(each for each in range(40))) == 40
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_loop_that_makes_tuples_meanwhile_is_left_alone() -> None:
    """A server that is done serves the others. A list of all objects refers to tuples that are half made."""
    errors, before = list[BaseException](), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with making_tuples(errors):
            remaining = Remaining(lambda: None)
            for _ in range(20):
                remaining.finish("server 0")
    finally:
        sys.setswitchinterval(before)
    assert errors == []


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_executors_are_waited_for_wherever_they_were_begun(kind: type) -> None:
    before, go = ThreadPoolExecutor(1), threading.Event()
    idle = before.submit(int)
    remaining = Remaining(lambda: None)
    executor = kind(2)
    results = [executor.submit(pow, 2, 10) for _ in range(20)]
    with ThreadPoolExecutor(1) as forgets:
        late = forgets.submit(lambda: ThreadPoolExecutor(1).submit(go.wait, 30))
        go.set()
        remaining.finish("server 0")
    assert [each.result(0) for each in results] == [1024] * 20
    assert late.result(0).done()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(int)
    assert before.submit(int).result(30) == idle.result(30) == 0, "one of before is not the function's"
    before.shutdown()


def test_exit_handlers_run_when_all_threads_are_done() -> None:
    done = list[str]()
    remaining = Remaining(lambda: done.append("exit"))
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(30), done.append("thread")))
    thread.start()
    threading.Timer(0.01, go.set).start()
    remaining.finish("server 0")
    assert done == ["thread", "exit"]
