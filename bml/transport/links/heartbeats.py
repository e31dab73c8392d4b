"""Heartbeats of one NIC: sealed UDP datagrams on the same address and port number as its TCP listener.

A beat counts only if it comes from where its server is known to listen, was made in the incarnation that the
server is known to be in, for ours, and is newer than all before. Its numbers are never forgotten while that
incarnation is known, so that no beat that was overheard counts a second time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from bml.io.poller import READ, Poller
from bml.transport.handshake.auth import BEAT_NBYTES, Beat, open_beat, seal_beat
from bml.transport.interface import Endpoint

_BEATS_PER_PASS = 64


class BeatSocket:
    """Sends beats over one NIC, reports valid ones with `on_beat(peer)`, and counts anything else."""

    def __init__(
        self,
        sock: socket.socket,
        poller: Poller,
        *,
        server: int,
        incarnation: int,
        level: int,
        token: bytes,
        job: bytes,
        on_beat: Callable[[int], None],
    ) -> None:
        self._sock = sock
        self._poller = poller
        self._server = server
        self._incarnation = incarnation
        self._level = level
        self._token = token
        self._job = job
        self._on_beat = on_beat
        self._muted = False
        self._sequence = 0
        self._latest: dict[int, int] = {}
        self._known: dict[int, tuple[Endpoint, int]] = {}
        self.rejected = 0
        """Datagrams that were not valid new beats for this NIC."""
        poller.add(sock.fileno(), READ, self._ready)

    def send(self, peer: int, endpoint: Endpoint, incarnation: int) -> None:
        """Send one beat; never fails, as a lost beat is what the peer's detector is for."""
        self.expect(peer, endpoint, incarnation)
        if self._muted:
            return
        self._sequence += 1
        beat = Beat(self._server, peer, self._level, self._sequence, self._incarnation, incarnation)
        try:
            self._sock.sendto(seal_beat(self._token, self._job, beat), endpoint)
        except OSError:
            return

    def expect(self, peer: int, endpoint: Endpoint, incarnation: int) -> None:
        """Beats of this peer come from there, from that incarnation, and count anew if it was not known."""
        if self._known.get(peer) != (endpoint, incarnation):
            self._known[peer] = (endpoint, incarnation)
            self._latest.pop(peer, None)

    def mute(self) -> None:
        """Neither send nor receive until `unmute`."""
        if not self._muted:
            self._muted = True
            self._poller.remove(self._sock.fileno())

    def unmute(self) -> None:
        """End `mute`; what arrived meanwhile is thrown away."""
        if self._muted:
            self._muted = False
            while self._receive() is not None:
                pass
            self._poller.add(self._sock.fileno(), READ, self._ready)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._sock.fileno() >= 0:
            self._poller.remove(self._sock.fileno())
            self._sock.close()

    def _ready(self, events: int) -> None:
        for _ in range(_BEATS_PER_PASS):
            received = self._receive()
            if received is None:
                return
            datagram, source = received
            beat = open_beat(self._token, self._job, datagram)
            if (
                beat is None
                or self._known.get(beat.server) != (source, beat.incarnation)
                or not self._is_new(beat)
            ):
                self.rejected += 1
                continue
            self._latest[beat.server] = beat.sequence
            self._on_beat(beat.server)
            if self._muted or self._sock.fileno() < 0:
                return

    def _is_new(self, beat: Beat) -> bool:
        for_us = (beat.dest, beat.dest_incarnation, beat.level) == (
            self._server,
            self._incarnation,
            self._level,
        )
        return for_us and beat.sequence > self._latest.get(beat.server, -1)

    def _receive(self) -> tuple[bytes, Endpoint] | None:
        try:
            datagram, source = self._sock.recvfrom(BEAT_NBYTES + 1)
        except OSError:
            return None
        return datagram, source[:2]
