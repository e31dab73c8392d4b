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

from bml.io.forks import close_on_fork, no_fork
from bml.transport.handshake.auth import Identity
from bml.transport.interface import Endpoint
from bml.transport.links.heartbeats import HeartbeatSocket

_LOG = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("stand_in_process.py")
_TURNED = struct.Struct("=q")
_ENDS_WITHIN_S = 5.0

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
        self._process: subprocess.Popen[bytes] | None = None
        page = os.memfd_create("bml-turned", os.MFD_CLOEXEC)
        os.ftruncate(page, _TURNED.size)
        self._page = mmap.mmap(page, _TURNED.size)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = close_on_fork(ours)
        me = identity
        needs = me.token.hex(), me.job.hex(), me.server, me.incarnation, heartbeat_s, hold_s
        self._channel.send(" ".join(map(str, needs)).encode())
        self._channel.setblocking(False)
        try:
            self._process = _started(theirs.fileno(), page, [each.fileno() for each in heartbeats])
        except OSError as error:
            _LOG.warning("server %d has no stand-in: %s", me.server, error)
        finally:
            theirs.close()
            os.close(page)

    def begin(self, neighbours: PeersByLevel) -> None:
        """The loop begins. Before the first view heartbeats go to all neighbours: some have it earlier."""
        self._peers = neighbours
        self.turned()

    def turned(self) -> None:
        """The loop has turned, and sent the heartbeats that were due."""
        _TURNED.pack_into(self._page, 0, time.monotonic_ns())
        self.tell()

    def tell(self) -> None:
        """Tell the process of peers that are new, and of NICs that are silent."""
        for level, heartbeats in enumerate(self._heartbeats):
            if heartbeats.is_silent:
                self._peers[level] = {}
            elif sent := heartbeats.take_sent():
                self._peers[level] = sent
        if self._peers != self._told:
            with suppress(OSError):  # it is stopped, or gone; the next turn tries again
                self._channel.send(self._lines())
                self._told = self._peers.copy()

    def _lines(self) -> bytes:
        lines = (
            f"{level} {peer} {incarnation} {host} {port}"
            for level, peers in self._peers.items()
            for peer, ((host, port), incarnation) in peers.items()
        )
        return ("\n".join(lines) + "\n").encode()  # an empty message would be the end

    def close(self) -> None:
        """End the process, and wait until it has ended. Idempotent."""
        self._channel.close()
        self._page.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _started(channel: int, page: int, nics: list[int]) -> subprocess.Popen[bytes]:
    passed = [channel, page, *nics]
    with no_fork():
        return subprocess.Popen(
            [sys.executable, "-IS", str(_PROGRAM), *map(str, passed)],
            pass_fds=passed,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
