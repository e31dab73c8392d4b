"""Runs a command as on a machine of an emulated fabric: in the server's network, with its host name.

    python -m bml.lab.bench.room FABRIC-NAME s4 'command with arguments'

It is called like a remote shell, so that mpirun can start its daemons with it. It needs root.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import socket
import sys
from collections.abc import Sequence

from bml.fabric import namespace
from bml.fabric.layout import belongs, node_of
from bml.topology.errors import FabricError, UsageError

_CLONE_NEWUTS = 0x04000000


def host(server: int) -> str:
    """Return the host name of a server's machine."""
    return node_of(server)


def command(name: str, server: int, words: Sequence[str]) -> list[str]:
    """Return the command that runs these words on a server of the emulated fabric `name`."""
    return [*agent(name), host(server), f"exec {shlex.join(words)}"]


def agent(name: str) -> list[str]:
    """Return the command that takes the place of ssh; a host and a shell command follow it."""
    return [sys.executable, "-m", "bml.lab.bench.room", name]


def main() -> None:
    """Enter the server's network and become the command."""
    name, machine, *words = sys.argv[1:]
    full = f"{name}-{machine}"
    if not belongs(full, name):
        raise UsageError(f"{machine!r} is no server of the emulated fabric {name}")
    namespace.enter(namespace.path_of(full))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise FabricError(f"no host name of its own for {full}: {os.strerror(ctypes.get_errno())}")
    socket.sethostname(machine)
    os.execv("/bin/sh", ["sh", "-c", " ".join(words)])


if __name__ == "__main__":
    main()
