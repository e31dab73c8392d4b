"""Releases a server's sockets and shared memory in the processes that a training function forks.

A forked process, such as a worker that loads data, has a copy of every descriptor. While it held them, no
peer would see the connections of a dead server end, and the server's ports would still accept connections.
Python calls the handlers of this module in every process that it forks. A process that C code forks keeps the
descriptors; then the launcher reports the death of the server (bml.cluster.fleets.fork_server).
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """An object that a forked process must change, such as one with a lock or with shared memory."""

    def forked(self) -> None:
        """Release everything, in a child that was just forked; other threads may have held any lock then."""
        ...


class Closes(Protocol):
    """A socket, or a connection of multiprocessing."""

    def close(self) -> None:
        """Close its descriptor."""
        ...


class Inherited(Protocol):
    """Memory that a child of C code must not have, and one of Python has for a moment."""

    def before_fork(self) -> None:
        """Let the child that is about to be forked have it."""
        ...

    def after_fork(self) -> None:
        """In the parent: let no other child have it."""
        ...


_sockets: WeakSet[socket.socket] = WeakSet()
_others: WeakSet[Forked] = WeakSet()
_memory: WeakSet[Inherited] = WeakSet()


def close_on_fork(sock: socket.socket) -> socket.socket:
    """Close `sock` in every process that is forked from now on; returns `sock`."""
    _sockets.add(sock)
    return sock


def on_fork(thing: Forked) -> None:
    """Call `thing.forked()` in every process that is forked from now on, while `thing` is in use."""
    _others.add(thing)


def inherit(memory: Inherited) -> None:
    """Call `before_fork` and `after_fork` of `memory` around every fork; to be called while `no_fork`."""
    _memory.add(memory)


_STARTING = threading.RLock()


def no_fork() -> AbstractContextManager[bool]:
    """While a process of ours is started: another thread that forks waits until that is done.

    A child that is forked meanwhile would hold the socket on which the process waits for our end, and the
    pipe on which `subprocess.Popen` waits for its start: for as long as the child lives, which for a worker
    that loads data is until the training ends. No interrupt leaves it held: see bml.io.interruptible.
    """
    return _STARTING


def close_whole(end: Closes) -> None:
    """Close it for the other end, too: a child that is forked in the middle of that would have it open."""
    with no_fork():
        end.close()


def _before() -> None:
    _STARTING.acquire()
    for each in list(_memory):
        each.before_fork()


def _after() -> None:
    for each in list(_memory):
        each.after_fork()
    _STARTING.release()


def _forked() -> None:
    with ExitStack() as releases:  # each is tried, whatever another one raises
        releases.callback(_others.clear)
        releases.callback(_sockets.clear)
        for sock in list(_sockets):
            releases.callback(sock.close)
        for thing in list(_others):
            releases.callback(thing.forked)


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_STARTING.release)
os.register_at_fork(after_in_child=_forked)
