"""Ray's worker processes as forks of one process that has imported everything.

Ray starts two Pythons for a worker, one after the other, and both import Ray: in software emulation that
takes minutes for each actor. Here Ray starts this file instead (`RayParams.setup_worker_path`). It asks the
template for a process, and lives as long as that does. What runs in the fork is Ray's own worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

ADDRESS = "RDMA_TEST_TEMPLATE"
"""The variable with the path of the template's socket, which Ray's processes inherit."""


def ask() -> None:
    """Have the template fork a worker with this process's arguments and environment; return at its end."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.environ[ADDRESS])
        wanted = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
        sock.sendall(json.dumps(wanted).encode() + b"\n")
        while sock.recv(4096):  # the worker holds the other end
            pass


class WorkerTemplate:
    """Forks this process, which has no other thread yet. `close` ends the fork; workers end with raylets."""

    def __init__(self, folder: Path):
        path = str(folder / "template")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen(16)
        self._process = os.fork()
        if not self._process:
            try:
                _serve(listening)
            finally:
                os._exit(1)
        listening.close()
        os.environ[ADDRESS] = path

    def close(self) -> None:
        """End the template."""
        os.environ.pop(ADDRESS, None)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def _serve(listening: socket.socket) -> None:
    """Fork a worker for everyone who asks."""
    from ray._private.utils import set_kill_on_parent_death_linux

    set_kill_on_parent_death_linux()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        sock, _ = listening.accept()
        with sock, sock.makefile() as lines:
            wanted = json.loads(lines.readline())
            if not os.fork():
                listening.close()
                os.setsid()  # Ray kills the process groups of its workers
                _become(sock, **wanted)


def _become(sock: socket.socket, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run Ray's worker as the program that Ray has asked for, and end as it would."""
    import runpy

    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers.setup_worker import parser

    from bml.cluster.fleets.fork_server import draw_anew

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        draw_anew()
        setup, worker = parser.parse_known_args(arguments)
        context = RuntimeEnvContext.deserialize(setup.serialized_runtime_env_context or "{}")
        os.environ.update(context.env_vars)
        sys.argv = worker
        runpy.run_path(worker[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sock.close()
        os._exit(code)


if __name__ == "__main__":
    ask()
