"""The tcp transport: frames travel on the stream itself, except zero-copy payloads within a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from bml.sharedmem.zero_copy import ZeroCopy
from bml.transport.links.link import Link, LinkConnection, OnEnd
from bml.transport.links.links import LinkTransport
from bml.transport.links.ports import SNDBUF_NBYTES
from bml.transport.tcp.connection import Connection
from bml.transport.tcp.incoming import Intake
from bml.transport.tcp.zero_copy import ZeroCopyConnection, ZeroCopyIntake

__all__ = ["SNDBUF_NBYTES", "TcpTransport"]


class TcpTransport(LinkTransport):
    """`Transport` over TCP; the arguments are those of `LinkTransport`.

    With `zero_copy`, which it fences and closes, payloads stay where they are between servers of one host.
    """

    def __init__(
        self, server: int, nics: Sequence[str], *, zero_copy: ZeroCopy | None = None, **options: Any
    ) -> None:
        self._zero_copy = zero_copy
        super().__init__(server, nics, **options)

    def fence(self) -> None:
        """See `Transport`."""
        if self._zero_copy is not None:
            self._zero_copy.fence()
        super().fence()

    def close(self) -> None:
        """See `Transport`."""
        super().close()
        if self._zero_copy is not None:
            self._zero_copy.close()

    def _connection(self, link: Link, sock: socket.socket, on_end: OnEnd) -> LinkConnection:
        handler, peer, level = self._handler, link.peer, link.level
        admit, received = partial(handler.admit, peer, level), partial(handler.received, peer, level)
        heard = partial(handler.heard, peer, level)
        if self._zero_copy is None or not self._zero_copy.reads(peer):
            plain = Intake(admit, received, link.counters, self._max_nbytes)
            return Connection(sock, self._poller, link.queue, plain, heard, on_end)
        intake = ZeroCopyIntake(admit, received, link.counters, self._max_nbytes, self._zero_copy, peer)
        return ZeroCopyConnection(
            sock, self._poller, link.queue, intake, heard, on_end, self._zero_copy, peer, link.counters
        )
