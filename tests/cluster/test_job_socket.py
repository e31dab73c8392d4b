"""The door of a job answers, and is believed by, processes of its own user alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bml.cluster.launcher import jobsocket
from bml.cluster.launcher.jobsocket import JobSocket
from bml.errors import FabricError, UsageError

NOBODY = 65534
ASK = """
import os, socket, sys
os.setuid(int(sys.argv[2]))  # the interpreter itself may lie where only root finds it
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(10)
sock.connect(sys.argv[1])
try:
    sock.sendall(b'{"do": "status"}\\n')
    print(sock.recv(4096).decode(), end="")
except (BrokenPipeError, ConnectionResetError):
    pass
"""
PRETEND = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("there", flush=True)
while True:
    sock, _ = listener.accept()
    print(repr(sock.recv(4096)), flush=True)
    sock.close()
"""
OPEN = """
import os, sys
from bml.cluster.launcher.jobsocket import JobSocket
os.setuid(int(sys.argv[1]))
door = JobSocket.open("bml-theirs", lambda request: {"asked": request["do"]})
print(door.path, flush=True)
sys.stdin.read()
door.close()
"""

needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")


@pytest.fixture
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that everybody may enter, as the one above might be."""
    folder = Path("/tmp") / f"bml-test-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def ask(path: Path, user: int) -> str:
    command = [sys.executable, "-c", ASK, str(path), str(user)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


@needs_two_users
def test_another_user_is_not_answered(open_to_all: Path) -> None:
    asked: list[Any] = []

    def serve(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"state": "steady"}

    door = JobSocket(open_to_all / "job.sock", serve)
    door.path.chmod(0o777)  # the worst case
    try:
        assert ask(door.path, NOBODY) == ""
        assert asked == []
        assert json.loads(ask(door.path, os.geteuid())) == {"state": "steady"}
        assert asked == [{"do": "status"}]
    finally:
        door.close()


@needs_two_users
def test_another_users_socket_is_not_believed(open_to_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_to_all / "job.sock"
    monkeypatch.setattr(jobsocket, "folder", lambda: open_to_all)
    command = [sys.executable, "-c", PRETEND, str(path), str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "there\n"
            with pytest.raises(FabricError, match="belongs to another user"):
                jobsocket.call("job", {"do": "inject", "fault": "kill:4"})
            assert stranger.stdout.readline() == "b''\n", "it was looked for"
            assert stranger.stdout.readline() == "b''\n", "and told nothing"
        finally:
            stranger.kill()


def folder_of_nobody(path: Path) -> Path:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)
    return path


@contextmanager
def job_of(user: int) -> Iterator[Path]:
    """The door of a job of another user."""
    command = [sys.executable, "-c", OPEN, str(user)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().rstrip())
        process.communicate(timeout=30)


@needs_two_users
@pytest.mark.parametrize("keeps", [True, False])
def test_root_is_answered_by_the_job_of_a_user(
    keeps: bool, open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`keeps`: sudo may keep the user's runtime folder in the environment; root's own is another one."""
    runtime = folder_of_nobody(open_to_all / "runtime")
    monkeypatch.setenv("TMPDIR", str(open_to_all))
    monkeypatch.setattr(tempfile, "tempdir", str(open_to_all))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime) if keeps else "")
    with job_of(NOBODY) as path:
        assert path.parent == (runtime / "bml" if keeps else open_to_all / f"bml-{NOBODY}")
        assert jobsocket.call("bml-theirs", {"do": "status"}) == {"asked": "status"}
        assert jobsocket.folder() == open_to_all / "bml-0"
        assert jobsocket.folder().stat().st_uid == 0


@needs_two_users
def test_jobs_of_users_are_in_nobodys_way(open_to_all: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can make a socket; root chooses those by name, unless it has none of its own."""
    monkeypatch.setenv("TMPDIR", str(open_to_all))
    monkeypatch.setattr(tempfile, "tempdir", str(open_to_all))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    with job_of(NOBODY) as theirs:
        assert jobsocket.find(None) == theirs
        ours = JobSocket(jobsocket.folder() / "bml-ours.sock", lambda request: request)
        try:
            assert jobsocket.find(None) == ours.path
            assert jobsocket.find("bml-theirs") == theirs
            odd = JobSocket(jobsocket.folder() / "bml-\x1b]0;owned\x07.sock", lambda request: request)
            try:
                assert jobsocket.find(None) == ours.path, "its name would be shown"
            finally:
                odd.close()
        finally:
            ours.close()


@needs_two_users
def test_root_removes_nothing_for_a_user_and_follows_no_link(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the folder of a user may lead anywhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(open_to_all))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    theirs = folder_of_nobody(open_to_all / f"bml-{NOBODY}")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(theirs / "bml-dead.sock"))
    dead.close()
    door = JobSocket(open_to_all / "daemon", lambda request: {"obeyed": request})
    (theirs / "bml-link.sock").symlink_to(door.path)
    try:
        with pytest.raises(UsageError, match="no job bml-dead"):
            jobsocket.find("bml-dead")
        assert (theirs / "bml-dead.sock").exists()
        with pytest.raises(FabricError, match="belongs to another user"):
            jobsocket.call("bml-link", {"do": "inject", "fault": "kill:4"})
    finally:
        door.close()


@needs_two_users
def test_a_folder_of_another_user_is_not_to_be_removed(
    open_to_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_to_all))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    folder_of_nobody(open_to_all / f"bml-{os.geteuid()}")
    with pytest.raises(FabricError, match=f"belongs to user {NOBODY}.*XDG_RUNTIME_DIR"):
        jobsocket.folder()


def test_a_door_that_is_being_opened_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    listen = jobsocket._Server.server_activate

    def looked_for_first(server: Any) -> None:
        with pytest.raises(FabricError, match="no job that this user may ask"):
            jobsocket.find(None)
        listen(server)

    monkeypatch.setattr(jobsocket._Server, "server_activate", looked_for_first)
    door = JobSocket.open("bml-1", lambda request: {"here": True})
    assert door is not None
    assert jobsocket.call(None, {}) == {"here": True}
    door.close()
    assert list((tmp_path / "bml").iterdir()) == []


def test_a_runtime_folder_that_is_not_there_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `sudo`, which may keep the setting of a user whose folder is gone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run" / "user"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    door = JobSocket.open("bml-1", lambda request: {"here": True})
    assert door is not None
    assert jobsocket.call(None, {}) == {"here": True}
    door.close()
    assert [each.name for each in tmp_path.iterdir()] == [f"bml-{os.geteuid()}"]


def test_a_job_removes_the_doors_of_dead_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, listens in (("bml-dead", False), ("bml-busy", True)):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(jobsocket.folder() / f"{name}.sock"))
        if listens:
            sock.listen(0)
            busy = sock
            waiting = socket.socket(socket.AF_UNIX)
            waiting.connect(sock.getsockname())  # there is no room for another
        else:
            sock.close()
    begun = time.monotonic()
    with busy, waiting:
        door = JobSocket.open("bml-1", lambda request: {})
        assert door is not None
        assert time.monotonic() - begun < 30.0
        assert {path.stem for path in (tmp_path / "bml").iterdir()} == {"bml-1", "bml-busy"}
        door.close()
