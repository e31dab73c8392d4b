"""The fork server: its processes are the job's, and it looks after them while their launcher is there."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bml.cluster.fleets.fork_server import ForkServer
from bml.errors import StartError

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]
CLOSE_ON_EXEC = 0o2000000


_ends: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _ends_are_closed() -> Iterator[None]:
    yield
    while _ends:
        _ends.pop().close()


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer(prints=False)
    yield made
    made.close()


def the_process() -> psutil.Process:
    (found,) = [each for each in psutil.Process().children() if "fork_server" in " ".join(each.cmdline())]
    return found


def forked(server: ForkServer, within_s: float = 30.0) -> tuple[int, socket.socket]:
    """The number of a process, and our end of its socket."""
    ours, theirs = socket.socketpair()
    _ends.append(ours)
    return server.fork(theirs, within_s), ours


def test_its_processes_stay_in_the_session_and_hold_one_descriptor(server: ForkServer) -> None:
    """Of one that was forked before, a process would keep the connection open."""
    for _ in range(3):
        forked(server)
    children = the_process().children()
    assert len(children) == 3
    for child in children:
        assert (os.getsid(child.pid), os.getpgid(child.pid)) == (os.getsid(0), os.getpgid(0))
        held = [each for each in os.listdir(f"/proc/{child.pid}/fd") if int(each) > 2]
        assert len(held) == 1, [os.readlink(f"/proc/{child.pid}/fd/{each}") for each in held]
        flags = Path(f"/proc/{child.pid}/fdinfo/{held[0]}").read_text().split("flags:")[1].split()[0]
        assert int(flags, 8) & CLOSE_ON_EXEC, "what a training function starts does not inherit it"


def test_ends_are_reported_with_their_return_codes(server: ForkServer) -> None:
    (ends_itself, ours), (is_killed, _), (lives, _) = (forked(server) for _ in range(3))
    ours.close()
    assert server.returncode(ends_itself, 20.0) == 0
    server.kill(is_killed)
    assert server.returncode(is_killed, 20.0) == -signal.SIGKILL
    server.kill(is_killed)
    assert [server.has_ended(each) for each in (ends_itself, is_killed, lives)] == [True, True, False]
    assert server.returncode(lives, 0.0) is None
    os.eventfd_read(server.ends)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(server.ends)
    server.heard()


def test_a_process_that_comes_too_late_is_killed(server: ForkServer) -> None:
    first, ours = forked(server)
    ours.close()
    assert server.returncode(first, 20.0) == 0
    process = the_process()
    process.suspend()
    with pytest.raises(StartError, match="no process could be made: the machine is too busy"):
        forked(server, within_s=0.1)
    process.resume()
    number, ours = forked(server)
    ours.settimeout(0.2)
    with pytest.raises(TimeoutError):
        ours.recv(1)
    assert not server.has_ended(number), "it is the late one that is killed"
    while len(children := process.children()) != 1:
        assert len(children) < 3
        time.sleep(0.01)
    ours.close()
    assert server.returncode(number, 20.0) == 0


def test_without_descriptors_it_says_so_and_goes_on(server: ForkServer) -> None:
    forked(server)
    process = the_process()
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))  # those are standard input, output and error
    with pytest.raises(StartError, match="no process could be made: Too many open files"):
        forked(server)
    process.rlimit(psutil.RLIMIT_NOFILE, before)
    forked(server)


def test_its_socket_may_have_a_high_number() -> None:
    """`select` takes numbers below 1,024 only."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        server = ForkServer(prints=False)
        try:
            forked(server)
        finally:
            server.close()
    finally:
        for each in held:
            os.close(each)


def test_it_is_closed_though_it_is_stopped_and_takes_no_more_messages(server: ForkServer) -> None:
    numbers = [forked(server)[0] for _ in range(2)]
    process = the_process()
    children = process.children()
    process.suspend()
    for _ in range(10_000):
        server.kill(numbers[0])
    server.close()
    assert psutil.wait_procs([process, *children], 10)[1] == []


def test_a_stopped_process_ends_though_the_fork_server_was_killed(server: ForkServer) -> None:
    _, ours = forked(server)
    process = the_process()
    (child,) = process.children()
    child.suspend()
    process.kill()
    ours.close()
    server.close()
    assert psutil.wait_procs([child], 10)[1] == []


def test_a_process_that_sees_nothing_ends_though_the_fork_server_was_killed(server: ForkServer) -> None:
    """As of one whose training function holds the interpreter's lock: nobody takes the end of its line."""
    forked(server)
    process = the_process()
    (child,) = process.children()
    process.kill()
    server.close()
    assert psutil.wait_procs([child], 10)[1] == []


def test_signals_that_end_others_do_not_end_it(server: ForkServer) -> None:
    number, _ = forked(server)
    for sent in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        the_process().send_signal(sent)
    forked(server)
    assert not server.has_ended(number)


def test_modules_that_start_a_thread_are_not_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began its imports again and again, and forked nothing."""
    starts = "import threading, time; threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    (tmp_path / "starts.py").write_text(starts)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ForkServer(prints=False, modules=["starts"])
    try:
        monkeypatch.setattr("bml.cluster.fleets.fork_server.IMPORTS_S", 20.0)
        forked(server)
    finally:
        server.close()
