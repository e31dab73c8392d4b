"""Starts a Python process that has a socket to this one, and waits for the end of this one at it."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from bml.cluster.process import agent
from bml.cluster.process.agent import MOST_NBYTES, packet, read
from bml.errors import StartError
from bml.io.forks import close_on_fork, close_whole, no_fork

SOCKET = "SOCKET"
"""Stands for the descriptor of the socket in the arguments of a process, where it comes first in them."""


_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
"""The errors of a socket whose other end is gone, or that is closed."""
_ENDS_S = 10.0
"""How long a helper may take to end once it is asked to, in seconds."""


def start_with_socket(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
    *,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    prints: bool = False,
    own_session: bool = True,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start Python with these arguments; returns the process, and our end of the socket.

    It also has the `inherited` descriptors, and standard output if it `prints`. In a session of its own it
    is not sent the Ctrl-C of the terminal.
    """
    with no_fork():
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with theirs:
            number, at = theirs.fileno(), arguments.index(SOCKET)
            process = subprocess.Popen(
                [sys.executable, *arguments[:at], str(number), *arguments[at + 1 :]],
                pass_fds=[number, *inherited],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if prints else subprocess.DEVNULL,
                start_new_session=own_session,
            )
        return process, close_on_fork(ours)


class Helper:
    """A process that speaks JSON, one message a packet, and ends when the launcher is gone."""

    def __init__(
        self,
        arguments: Sequence[str],
        inherited: Sequence[int],
        environment: Mapping[str, str],
        prints: bool = False,
        own_session: bool = True,
    ):
        # Ctrl-C is the launcher's to handle.
        self.process, self.sock = start_with_socket(
            arguments,
            environment,
            inherited,
            kind=socket.SOCK_SEQPACKET,
            prints=prints,
            own_session=own_session,
        )

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = (), waits: bool = True) -> None:
        """Send a message. If the process is gone, the next read shows it.

        Raises StartError for a message that is too long, as with an environment of 128 KiB, and unless it
        `waits` if there is no room for it, as the process is stopped.
        """
        data = packet(dict(message))
        if len(data) > MOST_NBYTES:
            raise StartError(
                f"a process cannot be started: its command and environment take {len(data)} bytes, "
                f"{MOST_NBYTES} are possible"
            )
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
            self.sock.sendmsg([data], rights, 0 if waits else socket.MSG_DONTWAIT)  # send_fds ignores flags
        except OSError as error:
            if error.errno not in _GONE:
                raise StartError(f"a process cannot be started: {error.strerror}") from error

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, for which it waits; None if the process is gone."""
        try:
            data = self.sock.recv(MOST_NBYTES)
        except ConnectionError:
            return None
        return read(data) if data else None

    def hang_up(self, within_s: float = _ENDS_S) -> None:
        """Close the socket, which ends the process, and wait until it has ended. Idempotent."""
        close_whole(self.sock)
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:  # it is stopped, or stuck
            self.kill()

    def kill(self) -> None:
        """Kill the process, which has nothing to save. Idempotent."""
        close_whole(self.sock)
        self.process.kill()
        self.process.wait()


def start_agent(environment: Mapping[str, str], command: Sequence[str] = ()) -> Helper:
    """Start the parent of processes that are to have this environment, and more, and run this command.

    It is isolated from PYTHONPATH and the like; what it starts inherits these as they are.
    """
    return Helper(["-I", agent.__file__, SOCKET, *command], (), environment)
