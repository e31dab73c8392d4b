"""What a process that a training function forks lets go of: the server's sockets, and what else is not its.

A forked process, such as a worker that loads data, has a copy of every descriptor. While it held them, nobody
would see the connections of a dead server end, and its ports would still take calls. Processes that are not
forked by Python keep them; the launcher hears of a death otherwise (bml.cluster.fleets.fork_server).
"""

from __future__ import annotations

import os
import socket
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """What has more to let go of than a socket, or must not touch what it shares with its parent."""

    def forked(self) -> None:
        """Let go of everything, in a child that was just forked; other threads may have had any lock then."""
        ...


_sockets: WeakSet[socket.socket] = WeakSet()
_others: WeakSet[Forked] = WeakSet()


def close_on_fork(sock: socket.socket) -> socket.socket:
    """Have a socket closed in every process that is forked from now on; returns it."""
    _sockets.add(sock)
    return sock


def on_fork(thing: Forked) -> None:
    """Call `thing.forked()` in every process that is forked from now on, as long as it is in use."""
    _others.add(thing)


def _forked() -> None:
    for thing in list(_others):
        thing.forked()
    for sock in list(_sockets):
        sock.close()
    _others.clear()
    _sockets.clear()


os.register_at_fork(after_in_child=_forked)
