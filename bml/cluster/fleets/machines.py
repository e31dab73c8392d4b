"""Runs the machines of a job on an emulated fabric: a process in each namespace, with folders of its own.

`Machines` is the launcher's side; `main` runs their agent (bml.cluster.process.agent). It is the first
process of a PID namespace, so all processes of its machines end with it. It ends with the launcher, so
nothing is left behind.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bml.cluster.fleets.fork_server import ONE_THREAD
from bml.cluster.process.agent import Agent, packet
from bml.cluster.process.imports import what_we_import
from bml.cluster.process.starting import SOCKET, Helper
from bml.errors import FabricError
from bml.fabric import isolation, namespace

MACHINE_FOLDER = "/run/bml/machine"
"""Every machine has a folder of its own under this name, in memory."""
NONE = "none"
"""The name of the machine that has ended if none can be run at all."""
_SHARED_MEMORY = "/dev/shm"
_LOG = f"{MACHINE_FOLDER}/start.log"
_LOGS = (
    _LOG,
    f"{MACHINE_FOLDER}/session_latest/logs/raylet.err",
    f"{MACHINE_FOLDER}/session_latest/logs/raylet.out",
)
_LINES = 6
_MOST_TEXT = 1200
"""So many characters may the last words of a machine have."""
_SAYS_S = 5.0
"""How long the launcher may take to make room for them."""
_ENTRY = "from bml.cluster.fleets import machines; machines.main()"


class Machines:
    """The machines of one job. One thread may use it; any may `start` one. `close` ends all of them."""

    def __init__(self, inherited: Sequence[int], prints: bool):
        """`inherited` descriptors are open in every machine's process too."""
        Path(MACHINE_FOLDER).mkdir(parents=True, exist_ok=True)
        self._starting = threading.Lock()
        environment = {**os.environ, **ONE_THREAD, **what_we_import()}
        arguments = ["-P", "-c", _ENTRY, SOCKET, *map(str, inherited)]
        self._agent = Helper(arguments, inherited, environment, prints)
        self._words: dict[str, str] = {}

    @property
    def sock(self) -> socket.socket:
        """It can be read when there is something to hear."""
        return self._agent.sock

    def start(
        self, machine: str, space: str, command: Sequence[str], environment: dict[str, str], logged: bool
    ) -> None:
        """Run `command` as a machine in the network namespace behind the file `space`.

        With `logged` its prints are not shown; the last of them are kept for the case that it fails.
        """
        message = {"do": "start", "name": machine, "space": space, "command": list(command)}
        with self._starting:
            self._agent.send({**message, "environment": environment, "logged": logged})

    def hear(self) -> tuple[str, int, str]:
        """Wait for the end of a machine: its name, return code and last lines.

        Raises EOFError if no machine can run any more.
        """
        while (message := self._agent.receive()) is not None:
            match message:
                case {"is": "words", "name": name, "words": words}:  # it ends at once
                    self._words[name] = words
                case {"is": "ended", "name": name, "code": code}:
                    return name, code, self._words.pop(name, "")
                case {"name": name, "why": why}:
                    return name, 1, why
        raise EOFError

    def close(self) -> None:
        """Kill every process of every machine and wait until all are gone. Idempotent."""
        self._agent.hang_up()


def main() -> None:
    """Run machines for the launcher at the other end of the socket given as the first argument."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    inherited = [int(each) for each in sys.argv[2:]]
    try:
        isolation.isolate()
    except FabricError as error:
        launcher.send(packet({"is": "cannot", "name": NONE, "why": str(error)}))
        os._exit(1)
    Agent(launcher, partial(_run_machine, inherited)).run()
    os._exit(0)


def _run_machine(inherited: list[int], message: dict[str, Any], _: list[int], launcher: socket.socket) -> int:
    """See bml.cluster.process.agent.Body. It says its last words to the launcher itself."""
    code = 1
    try:
        namespace.enter(message["space"])
        isolation.own_folders((MACHINE_FOLDER, _SHARED_MEMORY))
        code = _run(message["command"], message["environment"], inherited, message["logged"])
        words = _last_words()
    except Exception as error:
        words = str(error)
    launcher.settimeout(_SAYS_S)
    with suppress(OSError):
        launcher.send(packet({"is": "words", "name": message["name"], "words": words[-_MOST_TEXT:]}))
    return code


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
