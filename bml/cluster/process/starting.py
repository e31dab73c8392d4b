"""Starts a Python process that has a socket to this one, and waits for the end of this one at it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bml.io.forks import close_on_fork, no_fork

SOCKET = "SOCKET"
"""Stands for the descriptor of the socket in the arguments of a process, where it comes first in them."""


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
