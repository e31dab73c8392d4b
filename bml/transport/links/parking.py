"""Authenticated connections from peers that are ahead of this server: kept until `set_peers` wants them."""

from __future__ import annotations

import logging
import socket

from bml.io.poller import PEER_CLOSED, Poller
from bml.transport.interface import LinkKey

_LOG = logging.getLogger(__name__)

MAX_PARKED = 256


class Parking:
    """One socket per (peer, level), at most `MAX_PARKED` in all; one whose peer goes away is closed.

    Each belongs to an incarnation of its peer. One of an earlier incarnation never takes a later one's place.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._sockets: dict[LinkKey, socket.socket] = {}
        self._incarnations: dict[LinkKey, int] = {}

    def put(self, key: LinkKey, sock: socket.socket, incarnation: int = 0) -> None:
        """Keep a socket in place of an older one of its key; closed if that one's incarnation is later."""
        if self._incarnations.get(key, 0) > incarnation:
            sock.close()
            return
        self._drop(key)
        if len(self._sockets) >= MAX_PARKED:
            oldest = next(iter(self._sockets))
            _LOG.warning("too many unwanted connections, closed that of server %d, level %d", *oldest)
            self._drop(oldest)
        self._sockets[key] = sock
        self._incarnations[key] = incarnation
        self._watch(key)

    def take(self, key: LinkKey, incarnation: int = 0) -> socket.socket | None:
        """Hand over the socket of this key, if it is of this incarnation; one of an earlier is closed."""
        parked = self._incarnations.get(key, incarnation)
        if parked > incarnation:
            return None
        sock = self._remove(key)
        if sock is not None and parked < incarnation:
            sock.close()
            return None
        return sock

    def mute(self, level: int) -> None:
        """Notice nothing on this level until `unmute`."""
        for key, sock in self._sockets.items():
            if key[1] == level:
                self._poller.remove(sock.fileno())

    def unmute(self, level: int) -> None:
        """End `mute`."""
        for key in self._sockets:
            if key[1] == level:
                self._watch(key)

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for key in list(self._sockets):
            self._drop(key)

    def _watch(self, key: LinkKey) -> None:
        self._poller.add(self._sockets[key].fileno(), PEER_CLOSED, lambda events: self._drop(key))

    def _remove(self, key: LinkKey) -> socket.socket | None:
        sock = self._sockets.pop(key, None)
        if sock is not None:
            del self._incarnations[key]
            self._poller.remove(sock.fileno())
        return sock

    def _drop(self, key: LinkKey) -> None:
        sock = self._remove(key)
        if sock is not None:
            sock.close()
