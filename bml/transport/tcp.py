"""The tcp transport: frames travel on the stream itself."""

from __future__ import annotations

import socket
from functools import partial

from bml.transport.connection import Connection
from bml.transport.intake import Intake
from bml.transport.link import Link, LinkConnection, OnEnd
from bml.transport.links import SNDBUF_NBYTES, LinkTransport

__all__ = ["SNDBUF_NBYTES", "TcpTransport"]


class TcpTransport(LinkTransport):
    """`Transport` over TCP; the arguments are those of `LinkTransport`."""

    def _connection(self, link: Link, sock: socket.socket, on_end: OnEnd) -> LinkConnection:
        handler, peer, level = self._handler, link.peer, link.level
        intake = Intake(
            partial(handler.admit, peer, level),
            partial(handler.received, peer, level),
            link.counters,
            self._max_nbytes,
        )
        return Connection(sock, self._poller, link.queue, intake, partial(handler.heard, peer, level), on_end)
