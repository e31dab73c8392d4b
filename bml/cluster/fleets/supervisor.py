"""Runs the machines of a job on an emulated fabric: a process in each namespace, with folders of its own.

`Supervisor` is the launcher's side; `main` runs in the supervisor. It is the first process of a PID
namespace, so all processes of its machines end with it. It ends with the launcher, so nothing is left behind.

    launcher    ("start", machine, namespace, command, environment, logged)   run this command as a machine
    supervisor  ("ended", machine, return code, the end of its logs)          it is over
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bml.cluster.fleets.fork_server import ONE_THREAD
from bml.cluster.process.imports import what_we_import
from bml.cluster.process.starting import SOCKET, start_with_socket
from bml.errors import FabricError
from bml.fabric import isolation, namespace
from bml.io.forks import close_whole, on_fork

MACHINE_FOLDER = "/run/bml/machine"
"""Every machine has a folder of its own under this name, in memory."""
SUPERVISOR = "supervisor"
"""The name in `ended` if no machines can be run at all."""
_SHARED_MEMORY = "/dev/shm"
_LOG = f"{MACHINE_FOLDER}/start.log"
_LOGS = (
    _LOG,
    f"{MACHINE_FOLDER}/session_latest/logs/raylet.err",
    f"{MACHINE_FOLDER}/session_latest/logs/raylet.out",
)
_TAIL_NBYTES = 1200
_LINES = 6
_ENTRY = "from bml.cluster.fleets import supervisor; supervisor.main()"


class Supervisor:
    """The machines of one job. One thread may use it; any may `start` one. `close` ends all of them."""

    def __init__(self, inherited: Sequence[int], prints: bool):
        """`inherited` descriptors are open in every machine's process too."""
        Path(MACHINE_FOLDER).mkdir(parents=True, exist_ok=True)
        self._starting = threading.Lock()
        environment = {**os.environ, **ONE_THREAD, **what_we_import()}
        arguments = ["-P", "-c", _ENTRY, SOCKET, *map(str, inherited)]
        # Ctrl-C is the launcher's to handle.
        self._process, ours = start_with_socket(arguments, environment, inherited, prints=prints)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        on_fork(self)

    def start(
        self, machine: str, space: str, command: Sequence[str], environment: dict[str, str], logged: bool
    ) -> None:
        """Run `command` as a machine in the network namespace behind the file `space`.

        With `logged` its prints are not shown; the last of them are kept for the case that it fails.
        """
        with self._starting, suppress(OSError):  # the supervisor is gone: the next read shows it
            self.connection.send(("start", machine, space, list(command), environment, logged))

    def ended(self) -> tuple[str, int, str]:
        """Return a machine that has ended: name, return code, last lines. Raises EOFError at the end."""
        _, machine, code, tail = self.connection.recv()
        return machine, code, tail

    def close(self) -> None:
        """Kill every process of every machine and wait until all are gone. Idempotent."""
        close_whole(self.connection)
        self._process.wait()

    def forked(self) -> None:
        """See bml.io.forks."""
        self.connection.close()


@dataclass
class _Machine:
    name: str
    words: int
    """A descriptor from which its last lines can be read."""


def main() -> None:
    """Run machines for the launcher at the other end of the socket given as the first argument."""
    launcher, *inherited = map(int, sys.argv[1:])
    connection: Connection[Any, Any] = Connection(launcher)
    try:
        isolation.isolate()
    except FabricError as error:
        connection.send(("ended", SUPERVISOR, 1, str(error)))
        os._exit(1)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child wakes it
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    machines: dict[int, _Machine] = {}
    while True:
        ready, _, _ = select.select([launcher, wake_read], [], [])
        if wake_read in ready:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        try:
            _reap(machines, connection)
            if launcher in ready:
                _, name, *rest = connection.recv()
                process, words = _start(inherited, *rest)
                machines[process] = _Machine(name, words)
        except (EOFError, OSError):
            os._exit(0)  # the launcher is gone: all processes in the namespace must end


def _start(
    inherited: list[int], space: str, command: list[str], environment: dict[str, str], logged: bool
) -> tuple[int, int]:
    words, say = os.pipe()
    process = os.fork()
    if process:
        os.close(say)
        return process, words
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(words)
        namespace.enter(space)
        isolation.own_folders((MACHINE_FOLDER, _SHARED_MEMORY))
        code = _run(command, environment, inherited, logged)
        os.write(say, _last_words().encode()[-_TAIL_NBYTES:])
        if code < 0:
            os.kill(os.getpid(), -code)  # end as the command did
    except BaseException as error:
        os.write(say, str(error).encode()[-_TAIL_NBYTES:])
    finally:
        os._exit(code & 0xFF)


def _run(command: list[str], environment: dict[str, str], inherited: list[int], logged: bool) -> int:
    if not logged:
        return subprocess.call(command, env=environment, pass_fds=inherited)
    with open(_LOG, "wb") as log:
        return subprocess.call(command, env=environment, stdout=log, stderr=log)


def _last_words() -> str:
    """Return the last lines of each log that is not empty."""
    said = []
    for path in _LOGS:
        with suppress(OSError):
            lines = Path(path).read_text(errors="replace").split("\n")
            said += [line.rstrip() for line in lines if line.strip()][-_LINES:]
    return "\n".join(said)


def _reap(machines: dict[int, _Machine], connection: Connection[Any, Any]) -> None:
    """Report the machines that have ended; as the first process it also reaps all orphans."""
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            machine = machines.pop(process, None)
            if machine is not None:
                os.set_blocking(machine.words, False)
                words = b""
                with suppress(BlockingIOError):
                    words = os.read(machine.words, _TAIL_NBYTES)
                os.close(machine.words)
                code = os.waitstatus_to_exitcode(status)
                connection.send(("ended", machine.name, code, words.decode(errors="replace")))
