"""The socket of a running job, in a private folder: one request and one answer, each a line of JSON.

    {"do": "status"}                       the status that bml status shows
    {"do": "inject", "fault": "kill:4"}    what the servers did
    {"do": "outcome"}                      how the job has ended; {} if it has not, after some seconds
    any error                              {"error": text, "usage": whether the request was wrong}

The folder belongs to the user alone, and both ends ask the kernel for the user of the other end. A job
answers processes of its user and of root, and only a process of the folder's user is believed. Root looks
into the folders of all users, and changes nothing there: what lies in them may lead anywhere.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import stat
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bml.errors import BmlError, FabricError, UsageError
from bml.io.forks import close_on_fork

_LOG = logging.getLogger(__name__)

_SUFFIX = ".sock"
_OPENING = ".new"
#: The longest path of a unix socket, less the name of a job.
_MOST_FOLDER = 107 - 24
_MOST_REQUEST_NBYTES = 1 << 16
_IDLE_S = 60.0  # a client that says nothing holds a thread for no longer
_CREDENTIALS = struct.Struct("=iII")  # ucred: process, user, group
_POLL_S = 0.02  # how long `close` may take, in seconds
_CALL_S = 15.0  # on an emulated fabric, an answer may take twice as long as that of a server

OUTCOME_S = 10.0
"""How long a request for the outcome of a job is held while the job runs; then it is asked again."""

Serve = Callable[[dict[str, Any]], dict[str, Any]]


class JobSocket:
    """The open socket of one job; `serve` answers a request or raises BmlError."""

    def __init__(self, path: Path, serve: Serve):
        self.path = path
        # It gets its name once it listens: a socket that does not listen is taken for that of a dead job.
        opening = path.with_suffix(_OPENING)
        with suppress(FileNotFoundError):
            opening.unlink()
        self._server = _Server(str(opening), _handler(serve))
        close_on_fork(self._server.socket)
        opening.chmod(0o600)
        opening.rename(path)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="bml-job-socket", daemon=True
        )
        self._thread.start()

    @classmethod
    def open(cls, job: str, serve: Serve) -> JobSocket | None:
        """Open the socket of a job; None, with a warning, if that is not possible: the job runs without it.

        Removes the sockets of launchers that were killed.
        """
        try:
            running()
            return cls(folder() / f"{job}{_SUFFIX}", serve)
        except (OSError, BmlError) as error:
            _LOG.warning("bml status and bml inject will not find this job: %s", error)
            return None

    def close(self) -> None:
        """Close it and remove the socket.

        The empty folder stays: another job may be about to open its socket there, and no other user can take
        its name meanwhile.
        """
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with suppress(FileNotFoundError):
            self.path.unlink()


def call(job: str | None, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the job of this name, or the only one that runs. Raises its UsageError or FabricError."""
    path = find(job)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_CALL_S)
            sock.connect(str(path))
            if _user_of(sock) != path.parent.lstat().st_uid:
                raise FabricError(f"{path} belongs to another user, and is not the socket of a job")
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as lines:
                answer = json.loads(lines.readline())
    except (OSError, ValueError) as error:
        raise FabricError(f"the job {path.stem} does not answer ({error}); is its launcher busy?") from None
    assert isinstance(answer, dict)
    if "error" in answer:
        raise (UsageError if answer.get("usage") else FabricError)(answer["error"])
    return answer


def find(job: str | None) -> Path:
    """Return the socket of the job of this name, or of the only one. Sockets of dead jobs are removed."""
    there = running()
    if job is None:  # jobs of others are root's to choose by name, unless it has none
        there = {name: path for name, path in there.items() if path.parent == folder()} or there
    names = ", ".join(there)
    if job is not None:
        if job not in there:
            raise UsageError(f"no job {job} runs here" + (f"; there are {names}" if names else ""))
        return there[job]
    if not there:
        raise FabricError(
            "no job that this user may ask runs on this machine; start one with bml run, or wait for one "
            "that was just started with bml status --wait"
        )
    if len(there) > 1:
        raise UsageError(f"several jobs run here: choose one with --job, of {names}")
    return next(iter(there.values()))


def running() -> dict[str, Path]:
    """Return the sockets of running jobs by their names. Sockets of dead jobs of this user are removed."""
    own = folder()
    others = [] if os.geteuid() else _folders_of_others()
    paths = [path for each in (*others, own) for path in sorted(each.glob(f"*{_SUFFIX}"))]
    named = [path for path in paths if path.stem.isprintable()]  # they are shown
    return {path.stem: path for path in named if _is_alive(path, path.parent == own)}


def folder() -> Path:
    """Return the folder of this user's sockets, and make it. Raises FabricError if it is not private."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    uid = os.geteuid()
    # sudo may keep the setting of another user.
    has_runtime = os.path.isdir(runtime) and os.stat(runtime).st_uid == uid
    own = Path(runtime) / "bml" if has_runtime else Path(tempfile.gettempdir()) / f"bml-{uid}"
    if len(str(own)) > _MOST_FOLDER:
        own = Path(f"/tmp/bml-{uid}")
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError as error:
        raise FabricError(f"cannot make the folder {own}: {error.strerror}") from error
    if found.st_uid != uid:
        raise FabricError(f"{own} belongs to user {found.st_uid}: set XDG_RUNTIME_DIR to a folder of yours")
    if not _is_private(found):
        raise FabricError(f"{own} is not a private folder of this user: remove it, or chmod 700 it")
    return own


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077


def _folders_of_others() -> list[Path]:
    """Return the private folders of the sockets of other users, where `folder` makes them."""
    temporary = {Path(tempfile.gettempdir()), Path("/tmp")}
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    asked = [runtime / "bml"] * runtime.is_absolute() + [*Path("/run/user").glob("*/bml")]
    asked += [path for each in sorted(temporary) for path in each.glob("bml-*") if path.name[4:].isdecimal()]
    found = []
    for path in asked:
        with suppress(OSError):  # it has gone, or is none of a user
            entry = path.lstat()
            if _is_private(entry) and entry.st_uid != os.geteuid():
                found.append(path)
    return found


def _is_alive(path: Path, removes: bool) -> bool:
    """Whether a process listens. `removes`: if its launcher was killed, the socket goes, too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:  # it is busy with other requests
            return True
        except ConnectionRefusedError:
            if removes:
                path.unlink(missing_ok=True)
            return False
        except OSError:
            return False
    return True


def _user_of(sock: socket.socket) -> int:
    """The user of the process at the other end."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False


def _handler(serve: Serve) -> type[socketserver.StreamRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        timeout = _IDLE_S

        def handle(self) -> None:
            if _user_of(self.request) not in (0, os.geteuid()):
                _LOG.warning("another user's process opened the job's socket, and was not answered")
                return
            with suppress(OSError):  # the process that asked has gone
                while line := self.rfile.readline(_MOST_REQUEST_NBYTES):
                    self.wfile.write(json.dumps(_answer(serve, line), default=str).encode() + b"\n")

    return Handler


def _answer(serve: Serve, line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise UsageError("a request is one JSON object on one line")
        return serve(request)
    except ValueError as error:
        return {"error": f"a request is one JSON object on one line: {error}", "usage": True}
    except BmlError as error:
        return {"error": str(error), "usage": isinstance(error, UsageError)}
