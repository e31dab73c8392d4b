"""The stand-in of a server: a small process that says that the server lives while its loop does not turn.

A training function may hold the interpreter's lock in a call of C, and then no thread of Python sends
heartbeats. The stand-in needs no lock of this process. It has the sockets of the heartbeats, so that what it
sends comes from this server, and sees when the loop turned last; while the loop turns it says nothing. It is
silent when this process is stopped or dead, and after `hold_s`. docs/explanation/liveness.md says why.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bml.io.forks import close_on_fork, no_fork
from bml.transport.handshake.auth import Identity
from bml.transport.interface import Endpoint
from bml.transport.links.heartbeats import HeartbeatSocket

_LOG = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("stand_in_process.py")
_TURNED = struct.Struct("=q")
_ENDS_WITHIN_S = 5.0  # it has nothing to finish

PeersByLevel = dict[int, dict[int, tuple[Endpoint, int]]]
"""By level, the peers to which heartbeats go: (endpoint, incarnation)."""


class StandIn:
    """Runs a stand-in for the server of `identity` that sends heartbeats by these sockets, one a NIC.

    Without one, as where no process can be started, a held lock is taken for a dead server: that is logged.
    """

    def __init__(
        self,
        identity: Identity,
        heartbeats: Sequence[HeartbeatSocket],
        heartbeat_s: float,
        hold_s: float,
    ) -> None:
        self._heartbeats = heartbeats
        self._peers, self._told = PeersByLevel(), PeersByLevel()
        self._running: _Running | None = None
        needs = identity.token.hex(), identity.job.hex(), identity.server, identity.incarnation
        try:
            self._running = _started([each.fileno() for each in heartbeats])
            self._running.channel.send(" ".join(map(str, (*needs, heartbeat_s, hold_s))).encode())
        except OSError as error:
            _LOG.warning("server %d has no stand-in: %s", identity.server, error)

    def begin(self, neighbours: PeersByLevel) -> None:
        """The loop begins. Before the first view heartbeats go to all neighbours: some have it earlier."""
        self._peers = neighbours
        self.turned()

    def turned(self) -> None:
        """The loop has turned, and sent the heartbeats that were due."""
        if self._running is not None:
            _TURNED.pack_into(self._running.page, 0, time.monotonic_ns())
            if self._running.process.poll() is not None:
                _LOG.warning("the stand-in has ended: a held lock is taken for a dead server from now on")
                self.close()
        self.tell()

    def tell(self) -> None:
        """Tell the process of peers that are new, and of NICs that are silent."""
        for level, heartbeats in enumerate(self._heartbeats):
            if heartbeats.is_silent:
                self._peers[level] = {}
            elif sent := heartbeats.take_sent():
                self._peers[level] = sent
        if self._running is not None and self._peers != self._told:
            with suppress(OSError):  # it is stopped, or gone; the next turn tries again
                self._running.channel.send(self._lines())
                self._told = self._peers.copy()

    def _lines(self) -> bytes:
        lines = (
            f"{level} {peer} {incarnation} {host} {port}"
            for level, peers in self._peers.items()
            for peer, ((host, port), incarnation) in peers.items()
        )
        return ("\n".join(lines) + "\n").encode()  # to nobody, too: an empty message would be the end

    def close(self) -> None:
        """End the process, and wait until it has ended. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.channel.close()
            running.page.close()
            try:
                running.process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: socket.socket
    page: mmap.mmap


def _started(nics: list[int]) -> _Running:
    if not sys.executable:
        raise OSError("this program has no interpreter of its own to start one")
    page = os.memfd_create("bml-turned", os.MFD_CLOEXEC)
    try:
        os.ftruncate(page, _TURNED.size)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = _process_with([theirs.fileno(), page, *nics])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return _Running(process, close_on_fork(ours), mmap.mmap(page, _TURNED.size))
    finally:
        os.close(page)


def _process_with(descriptors: list[int]) -> subprocess.Popen[bytes]:
    with no_fork():
        return subprocess.Popen(
            [sys.executable, "-IS", str(_PROGRAM), *map(str, descriptors)],
            pass_fds=descriptors,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
