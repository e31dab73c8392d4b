"""One NIC of this server: where it listens, its heartbeats, and the connections that it opens.

A fault can silence a NIC. It then neither sends nor receives anything, and no peer may notice a sign of that:
a socket that is closed meanwhile is kept open until the NIC works again.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from bml.io.poller import Poller
from bml.transport.handshake.auth import DialerHandshake, Identity, Role
from bml.transport.handshake.greeting import Dial, OnFailed, OnGreeted, Route, fresh_nonce
from bml.transport.handshake.listening import Listener
from bml.transport.interface import Endpoint
from bml.transport.links.heartbeats import HeartbeatSocket
from bml.transport.links.ports import bind_pair
from bml.transport.links.settings import LinkSettings

_LOG = logging.getLogger(__name__)


class LocalNic:
    """The NIC of `level`, with one local IP `address`; `silent` while a fault silences it.

    `on_open(socket, hello)` is called for every peer that connects and proves itself, `on_heartbeat(peer,
    stands_in)` for every valid heartbeat. Raises FabricError if the address is not on this machine.
    """

    def __init__(
        self,
        identity: Identity,
        level: int,
        address: str,
        poller: Poller,
        settings: LinkSettings,
        on_open: OnGreeted,
        on_heartbeat: Callable[[int, bool], None],
    ) -> None:
        self.name = f"server {identity.server} NIC {level} ({address})"
        self.silent = False
        self._identity = identity
        self._level = level
        self._address = address
        self._poller = poller
        self._settings = settings
        self._closed = False
        self._deferred_closes: list[socket.socket] = []
        tcp, udp = bind_pair(address, self.name, settings.traffic_class)
        me = identity.hello(Role.DATA, level)
        self.listener = Listener(tcp, poller, token=identity.token, me=me, on_open=on_open)
        self.heartbeats = HeartbeatSocket(udp, poller, identity, level, on_heartbeat)

    @property
    def endpoint(self) -> Endpoint:
        """(host, port) where it listens."""
        return self.listener.endpoint

    def dial(
        self,
        role: Role,
        wanted: tuple[int, int],
        endpoint: Endpoint,
        held: bool,
        on_open: OnGreeted,
        on_fail: OnFailed,
    ) -> Dial | None:
        """Dial `wanted`, (server, incarnation); returns None if nothing can be sent now.

        `held`: an injected fault keeps the attempt without an answer.
        """
        if self.silent:
            return None
        me = self._identity.hello(role, self._level)
        handshake = DialerHandshake(self._identity.token, me, fresh_nonce(), *wanted)
        route = Route(self._address, self._settings.traffic_class, held)
        try:
            return Dial(endpoint, handshake, self._poller, on_open, on_fail, route, self._settings.connect_s)
        except OSError as error:
            _LOG.warning("%s: cannot make a socket: %s; trying again", self.name, error)
            return None

    def silence(self) -> None:
        """Neither send nor receive anything until `unsilence`."""
        self.silent = True
        self._deferred_closes += self.listener.mute()
        self.heartbeats.mute()

    def unsilence(self) -> None:
        """End `silence`, and close the sockets that were closed meanwhile."""
        self.silent = False
        self._close_deferred()
        self.listener.unmute()
        self.heartbeats.unmute()

    def close_socket(self, sock: socket.socket | None) -> None:
        """Close a socket of this NIC; later if the NIC is silent, as the peer would notice."""
        if sock is None:
            return
        if self.silent and not self._closed:
            self._deferred_closes.append(sock)
        else:
            sock.close()

    def close(self) -> None:
        """Stop listening, and close all sockets that are still to be closed. Idempotent."""
        self._closed = True
        self.listener.close()
        self.heartbeats.close()
        self._close_deferred()

    def _close_deferred(self) -> None:
        deferred, self._deferred_closes = self._deferred_closes, []
        for sock in deferred:
            sock.close()
