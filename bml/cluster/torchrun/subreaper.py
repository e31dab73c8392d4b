"""The subreaper: a small process that is the parent of a node's ranks, and leaves none behind.

It is run as a file and imports nothing but the standard library, so that it is there in 50 ms. Each rank
leads a session of its own, and the process group of that. When a rank ends, all processes of the group get
SIGKILL, such as workers that load data. Processes that have left the group become children of the subreaper
when their parent ends; they are ended with the job. When the launcher is gone, everything is killed; when the
subreaper is killed, so are the ranks. Messages are JSON, one a packet.

    launcher  {"do": "start", "rank", "environment"}, with two descriptors: standard output and error
              {"do": "signal", "rank", "number"}    to all processes of the rank's group
              {"do": "tell", "number"}              to the ranks that have a handler for it, and to them alone
              {"do": "end", "grace_s"}              SIGTERM to all, and SIGKILL after so long
    subreaper    {"is": "started", "rank", "process"}, {"is": "ended", "rank", "code"}, negative for a signal,
              {"is": "cannot", "rank", "why"}       the command cannot be run
              {"is": "told", "number", "ranks"}     those that have a handler
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_NBYTES = 1 << 16
"""Longest message."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_GONE_S = 5.0
"""How long processes may take to end after SIGKILL; then the subreaper gives up on them."""


class Subreaper:
    """See the beginning of this module."""

    def __init__(self, launcher: socket.socket, command: list[str]):
        self._launcher, self._command = launcher, command
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._ranks: dict[int, int] = {}
        """Process -> rank."""
        self._ending_at: float | None = None
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child wakes it
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # not ignored, as the ranks would inherit that
            signal.signal(number, lambda *_: None)
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Obey the launcher until it is gone, or everything has ended that it wanted ended."""
        while self._ending_at is None or self._children():
            left_s = None if self._ending_at is None else max(0.0, self._ending_at - time.monotonic())
            if left_s == 0:
                break
            ready, _, _ = select.select([self._launcher.fileno(), self._wake], [], [], left_s)
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            self._reap()
            if self._launcher.fileno() in ready and not self._obey():
                break
        self._kill_all()

    def _obey(self) -> bool:
        """Carry out a message of the launcher; returns False if it is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._launcher, MOST_NBYTES, 2)
        except ConnectionError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if message["do"] == "start":
            self._start(message["rank"], message["environment"], descriptors)
        elif message["do"] == "signal":
            for process, rank in self._ranks.items():
                if rank == message["rank"]:
                    _signal(process, message["number"])
        elif message["do"] == "tell":
            self._tell(message["number"])
        else:
            for process in self._children():
                _signal(process, signal.SIGTERM)
                _signal(process, signal.SIGCONT)  # a frozen one has it now
            self._ending_at = time.monotonic() + message["grace_s"]
        return True

    def _tell(self, number: int) -> None:
        told = {process: rank for process, rank in self._ranks.items() if _handles(process, number)}
        for process in told:
            with suppress(OSError):
                os.kill(process, number)
        self._say({"is": "told", "number": number, "ranks": sorted(told.values())})

    def _start(self, rank: int, environment: dict[str, str], descriptors: list[int]) -> None:
        subreaper = os.getpid()

        def die_with_subreaper() -> None:
            self._prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != subreaper:
                os._exit(1)

        try:
            process = subprocess.Popen(
                self._command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=descriptors[0],
                stderr=descriptors[1],
                start_new_session=True,
                preexec_fn=die_with_subreaper,  # safe, as this process has one thread
            )
        except OSError as error:
            self._say({"is": "cannot", "rank": rank, "why": error.strerror or str(error)})
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        process.returncode = 0  # it is reaped below
        self._ranks[process.pid] = rank
        self._say({"is": "started", "rank": rank, "process": process.pid})

    def _reap(self) -> None:
        """Report the ranks that have ended, with all other processes of their groups."""
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in self._ranks:  # it is not reaped yet, so the number is still its own
                    _signal(found.si_pid, signal.SIGKILL)
                _, status = os.waitpid(found.si_pid, 0)
                rank = self._ranks.pop(found.si_pid, None)
                if rank is not None:
                    code = os.waitstatus_to_exitcode(status)
                    self._say({"is": "ended", "rank": rank, "code": code})

    def _kill_all(self) -> None:
        """Kill all children, then those that become children by that, until there are none."""
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline:
            self._reap()
            children = self._children()
            if not children:
                return
            for process in children:
                _signal(process, signal.SIGKILL)
            select.select([self._wake], [], [], 0.05)
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)

    def _children(self) -> list[int]:
        """Return the processes of which this is the parent."""
        found, parent = [], str(os.getpid())
        for entry in os.listdir("/proc"):
            with suppress(OSError, IndexError):  # it has ended
                if entry.isdigit():
                    words = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    if words[1] == parent and words[0] != "Z":
                        found.append(int(entry))
        return found

    def _say(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the launcher is gone: the next read shows it
            self._launcher.send(json.dumps(message).encode())


def _signal(process: int, number: int) -> None:
    """Send a signal to a process and all of its group, if it leads one."""
    with suppress(OSError):
        if os.getpgid(process) == process:
            os.killpg(process, number)
        else:
            os.kill(process, number)


def _handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal: without one, most signals would end it."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def main() -> None:
    """Keep ranks for the launcher at the other end of the socket in the first argument; then the command."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    launcher.set_inheritable(False)
    Subreaper(launcher, sys.argv[2:]).run()


if __name__ == "__main__":
    main()
