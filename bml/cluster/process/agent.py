"""The agent: a small process that is the parent of others, and leaves none behind.

`Agent` runs in it; `bml.cluster.process.starting.Helper` is the launcher's side. What it starts has a name,
and leads a session and the process group of that. When it ends, all processes of the group get SIGKILL,
such as workers that load data. Processes that have left the group become children of the agent when their
parent ends; they are ended with the job. When the launcher is gone, everything is killed; when the agent is
killed, so is what it started. The fork server is milder, see `Agent`. Messages are JSON, one a packet.

    launcher  {"do": "start", "name", "command", "environment"}, with descriptors of standard output and
              error; without a command it is that of the agent's arguments. The environment is added to the
              agent's own. An agent with a body has messages and descriptors of its own
              {"do": "signal", "names", "number"}   to these, with all processes of their groups
              {"do": "tell", "number"}              to those that have a handler for it, and to them alone
              {"do": "end", "grace_s"}              SIGTERM to all, and SIGKILL after so long
    agent     {"is": "started", "name", "process"}  only by the fork server, which may be stopped later
              {"is": "cannot", "name", "why", "errno"}   it cannot be started; 0: by no error of the system
              {"is": "ended", "name", "code"}       the code is negative for a signal
              {"is": "told", "number", "names"}     those that have a handler

It never waits for the launcher, which may start many before it reads. For ranks it is run as a file and
imports nothing but the standard library, so that it is there in 50 ms.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_NBYTES = 1 << 17
"""Longest message."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_GONE_S = 5.0
"""How long processes may take to end after SIGKILL; then the agent gives up on them."""
_LONGEST_POLL_MS = (1 << 31) - 1

Message = dict[str, Any]
Body = Callable[[Message, list[int], socket.socket], int]
"""Runs in a forked process: it is given the message that started it, with its descriptors, and the socket to
the launcher. Returns its exit status; a negative one is the signal by which it is to end."""


class Agent:
    """See the beginning of this module. With a `body` it starts forks that run this, else commands.

    With `ending_s` its forks stay in its session, and it signals them alone, not what they start. They go on
    when it is killed. Once the launcher is gone, they may take so long to end by themselves.
    """

    def __init__(
        self,
        launcher: socket.socket,
        body: Body | None = None,
        command: Sequence[str] = (),
        ending_s: float | None = None,
    ):
        launcher.set_inheritable(False)
        self._launcher, self._body, self._command = launcher, body, command
        self._makes_sessions, self._ending_s = ending_s is None, ending_s or 0.0
        self._unsent: deque[bytes] = deque()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        if self._makes_sessions:
            self._prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._names: dict[int, Any] = {}
        """Process -> name."""
        self._ending_at: float | None = None
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a child wakes it
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # not ignored, as what it starts would inherit that
            signal.signal(number, lambda *_: None)
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        """Obey the launcher until it is gone, or everything has ended that it wanted ended."""
        launcher = self._launcher.fileno()
        heard = [launcher]
        while self._ending_at is None or self._children() or self._unsent:
            left_s = None if self._ending_at is None else max(0.0, self._ending_at - time.monotonic())
            if left_s == 0:
                break
            if launcher in self._wait(heard, left_s) and not self._obey():
                heard.clear()
                self._ending_at = time.monotonic() + self._ending_s
        if os.getpid() != 1:  # the first process of a namespace takes all others along
            self._kill_all()
        self._send(_GONE_S)

    def _wait(self, heard: list[int], within_s: float | None) -> list[int]:
        """Wait for the end of a child, which is reported, or for one of these descriptors to be readable."""
        poll, launcher = select.poll(), self._launcher.fileno()  # whose number may be above those of select
        poll.register(self._wake, select.POLLIN)
        reads = select.POLLIN if launcher in heard else 0
        if reads or self._unsent:
            poll.register(launcher, reads | (select.POLLOUT if self._unsent else 0))
        found = poll.poll(None if within_s is None else min(within_s * 1000, _LONGEST_POLL_MS))
        ready = [number for number, events in found if events & (select.POLLIN | select.POLLHUP)]
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        self._send()
        self._reap()
        return ready

    def _obey(self) -> bool:
        """Carry out a message of the launcher; returns False if it is gone."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._launcher, MOST_NBYTES, 2)
        except ConnectionError:
            return False
        for descriptor in descriptors:  # processes of a training function must not inherit them
            os.set_inheritable(descriptor, False)
        if not data:
            return False
        message = read(data)
        if message["do"] == "start" and flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            self._cannot(message["name"], OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        elif message["do"] == "start":
            self._start(message, descriptors)
        elif message["do"] == "signal":
            for process in [each for each, name in self._names.items() if name in message["names"]]:
                self._signal(process, message["number"])
        elif message["do"] == "tell":
            self._tell(message["number"])
        else:
            for process in self._children():
                self._signal(process, signal.SIGTERM)
                self._signal(process, signal.SIGCONT)  # a frozen one has it now
            self._ending_at = time.monotonic() + message["grace_s"]
        return True

    def _tell(self, number: int) -> None:
        told = {process: name for process, name in self._names.items() if _handles(process, number)}
        for process in told:
            with suppress(OSError):
                os.kill(process, number)
        self._say({"is": "told", "number": number, "names": sorted(told.values())})

    def _start(self, message: Message, descriptors: list[int]) -> None:
        name = message["name"]
        try:
            process = self._fork(message, descriptors) if self._body else self._execute(message, descriptors)
        except (OSError, ValueError) as error:
            self._cannot(name, error)
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._names[process] = name
        if not self._makes_sessions:
            self._say({"is": "started", "name": name, "process": process})

    def _cannot(self, name: Any, error: OSError | ValueError) -> None:
        number = getattr(error, "errno", None) or 0
        why = getattr(error, "strerror", None) or str(error)
        self._say({"is": "cannot", "name": name, "why": why, "errno": number})

    def _execute(self, message: Message, descriptors: list[int]) -> int:
        """Run a command, with the two descriptors as standard output and error."""
        agent = os.getpid()

        def die_with_agent() -> None:
            self._prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != agent:
                os._exit(1)

        process = subprocess.Popen(
            message.get("command") or self._command,
            env={**os.environ, **message["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=descriptors[0],
            stderr=descriptors[1],
            start_new_session=True,
            preexec_fn=die_with_agent,  # safe, as this process has one thread
        )
        process.returncode = 0  # it is reaped below
        return process.pid

    def _fork(self, message: Message, descriptors: list[int]) -> int:
        """Run the body in a fork."""
        assert self._body is not None
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            if self._makes_sessions:
                os.setsid()
                self._prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for descriptor in (signal.set_wakeup_fd(-1), self._wake):
                os.close(descriptor)
            for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_DFL)
            code = self._body(message, descriptors, self._launcher)
            if code < 0:
                os.kill(os.getpid(), -code)
        finally:
            os._exit(code & 0xFF)

    def _reap(self) -> None:
        """Report what has ended, with all other processes of the groups; orphans are reaped, too."""
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in self._names:  # it is not reaped yet, so the number is still its own
                    self._signal(found.si_pid, signal.SIGKILL)
                _, status = os.waitpid(found.si_pid, 0)
                if found.si_pid in self._names:
                    code, name = os.waitstatus_to_exitcode(status), self._names.pop(found.si_pid)
                    self._say({"is": "ended", "name": name, "code": code})

    def _kill_all(self) -> None:
        """Kill all children, then those that become children by that, until there are none."""
        deadline = time.monotonic() + _GONE_S
        while (children := self._children()) and time.monotonic() < deadline:
            for process in children:
                self._signal(process, signal.SIGKILL)
            self._wait([], 0.05)

    def _children(self) -> list[int]:
        """Return the processes of which this is the parent; those that a preloaded module started go on."""
        if not self._makes_sessions:
            return [*self._names]
        found, parent = [], str(os.getpid())
        for entry in os.listdir("/proc"):
            with suppress(OSError, IndexError):  # it has ended
                if entry.isdigit():
                    words = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    if words[1] == parent:  # a zombie may have threads that live: only waitid knows
                        found.append(int(entry))
        return found

    def _signal(self, process: int, number: int) -> None:
        """Send a signal to a process, and to all of its group if that was made for it."""
        with suppress(OSError):
            if self._makes_sessions and os.getpgid(process) == process:
                os.killpg(process, number)
            else:
                os.kill(process, number)

    def _say(self, message: Message) -> None:
        self._unsent.append(packet(message))
        self._send()

    def _send(self, within_s: float = 0.0) -> None:
        """Send what the launcher has room for, for which it waits so long."""
        self._launcher.settimeout(within_s)
        with suppress(BlockingIOError, TimeoutError):
            while self._unsent:
                try:
                    self._launcher.send(self._unsent[0])
                except ConnectionError:  # the launcher is gone: the next read shows it
                    self._unsent.clear()
                    return
                self._unsent.popleft()


def packet(message: Message) -> bytes:
    """A message as it is sent: any text of an environment or a command comes out as it was."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogateescape")


def read(data: bytes) -> Message:
    """The message of a packet."""
    found: Message = json.loads(data.decode("utf-8", "surrogateescape"))
    return found


def _handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal: without one, most signals would end it."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def main() -> None:
    """Be the agent of the launcher at the other end of the socket in the first argument."""
    Agent(socket.socket(fileno=int(sys.argv[1])), command=sys.argv[2:]).run()


if __name__ == "__main__":
    main()
