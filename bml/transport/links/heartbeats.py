"""Heartbeats of one NIC: sealed UDP datagrams on the same address and port number as its TCP listener.

A heartbeat counts only if it comes from the address where its server is known to listen, was made in the
incarnation that the server is known to be in, is for this server's own incarnation, and is newer than all
before. Sequence numbers are nanoseconds of this machine's clock, as the server's stand-in sends heartbeats,
too (see stand_in.py). They are remembered as long as that incarnation is known, so that a recorded heartbeat
does not count a second time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from bml.io.poller import READ, Poller
from bml.transport.handshake.auth import Identity
from bml.transport.handshake.sealing import HEARTBEAT_NBYTES, Heartbeat, open_heartbeat, seal_heartbeat
from bml.transport.interface import Endpoint

_HEARTBEATS_PER_PASS = 64


class HeartbeatSocket:
    """Sends heartbeats over one NIC, and reports valid ones; all others are counted.

    `on_heartbeat(peer, stands_in)`: see bml.transport.handshake.sealing.Heartbeat.
    """

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        identity: Identity,
        level: int,
        on_heartbeat: Callable[[int, bool], None],
    ) -> None:
        self._sock = sock
        self._poller = poller
        self._identity = identity
        self._level = level
        self._on_heartbeat = on_heartbeat
        self._muted = False
        self._held: list[tuple[bytes, Endpoint]] | None = None
        """Those that leave when the NIC goes on; None: it does not stand still."""
        self._sent: dict[int, tuple[Endpoint, int]] = {}
        self._latest: dict[int, int] = {}
        self._known: dict[int, tuple[Endpoint, int]] = {}
        self._gaps: dict[int, tuple[float, float]] = {}
        """When the latest heartbeat of each peer came, and the longest gap between two, in seconds."""
        self.rejected = 0
        """The number of datagrams that were no valid new heartbeats for this NIC."""
        poller.add(sock.fileno(), READ, self._ready)

    def send(self, peer: int, endpoint: Endpoint, incarnation: int) -> None:
        """Send one heartbeat; raises nothing, as the peer's detector deals with lost heartbeats."""
        self.expect(peer, endpoint, incarnation)
        if self._muted:
            return
        me = self._identity
        heartbeat = Heartbeat(me.server, peer, self._level, time.monotonic_ns(), me.incarnation, incarnation)
        sealed = seal_heartbeat(me.token, me.job, heartbeat)
        if self._held is None:
            self._send(sealed, endpoint)
        else:
            self._held.append((sealed, endpoint))

    def _send(self, sealed: bytes, endpoint: Endpoint) -> None:
        with suppress(OSError):
            self._sock.sendto(sealed, endpoint)

    def take_sent(self) -> dict[int, tuple[Endpoint, int]]:
        """The peers that were sent heartbeats, or are wanted, since this was asked last."""
        sent, self._sent = self._sent, {}
        return sent

    @property
    def is_silent(self) -> bool:
        """Whether a fault silences it."""
        return self._muted or self._held is not None

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._sock.fileno()

    def expect(self, peer: int, endpoint: Endpoint, incarnation: int) -> None:
        """Expect heartbeats of this peer from this endpoint, in this incarnation; a new one counts from 0."""
        self._sent[peer] = endpoint, incarnation
        if self._known.get(peer) != (endpoint, incarnation):
            self._known[peer] = (endpoint, incarnation)
            self._latest.pop(peer, None)
            self._gaps.pop(peer, None)

    def take_gap_s(self, peer: int, now: float) -> float | None:
        """The longest gap between two heartbeats of a peer since this was asked last."""
        if peer not in self._gaps:
            return None
        last_s, gap_s = self._gaps[peer]
        self._gaps[peer] = last_s, 0.0
        return max(gap_s, now - last_s)

    def mute(self) -> None:
        """Neither send nor receive until `unmute`."""
        if not self._muted:
            self._muted = True
            self._poller.remove(self._sock.fileno())
            if self._held is not None:
                self._held.clear()

    def unmute(self) -> None:
        """End `mute`; heartbeats that arrived meanwhile are discarded."""
        if self._muted:
            self._muted = False
            while self._receive() is not None:
                pass
            if self._held is None:
                self._poller.add(self._sock.fileno(), READ, self._ready)

    def hold(self) -> None:
        """Neither send nor receive until `release`; nothing is lost."""
        if self._held is None:
            self._held = []
            self._poller.remove(self._sock.fileno())

    def release(self) -> None:
        """End `hold`: send what was held, and receive what arrived meanwhile."""
        held, self._held = self._held, None
        if held is None or self._muted or self._sock.fileno() < 0:
            return
        for sealed, endpoint in held:
            self._send(sealed, endpoint)
        self._poller.add(self._sock.fileno(), READ, self._ready)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._sock.fileno() >= 0:
            self._poller.remove(self._sock.fileno())
            self._sock.close()

    def _ready(self, events: int) -> None:
        for _ in range(_HEARTBEATS_PER_PASS):
            received = self._receive()
            if received is None:
                return
            datagram, source = received
            heartbeat = open_heartbeat(self._identity.token, self._identity.job, datagram)
            if (
                heartbeat is None
                or self._known.get(heartbeat.server) != (source, heartbeat.incarnation)
                or not self._is_new(heartbeat)
            ):
                self.rejected += 1
                continue
            self._latest[heartbeat.server] = heartbeat.sequence
            self._note(heartbeat.server, time.monotonic())
            self._on_heartbeat(heartbeat.server, heartbeat.stands_in)
            if self._muted or self._held is not None or self._sock.fileno() < 0:
                return

    def _note(self, peer: int, now: float) -> None:
        last_s, gap_s = self._gaps.get(peer, (now, 0.0))
        self._gaps[peer] = now, max(gap_s, now - last_s)

    def _is_new(self, heartbeat: Heartbeat) -> bool:
        me = self._identity
        destination = (heartbeat.dest, heartbeat.dest_incarnation, heartbeat.level)
        for_us = destination == (me.server, me.incarnation, self._level)
        return for_us and heartbeat.sequence > self._latest.get(heartbeat.server, -1)

    def _receive(self) -> tuple[bytes, Endpoint] | None:
        try:
            datagram, source = self._sock.recvfrom(HEARTBEAT_NBYTES + 1)
        except OSError:
            return None
        return datagram, source[:2]
