"""The tcp transport: frames travel on the stream itself, except zero-copy payloads within a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

from bml.io.poller import Poller
from bml.sharedmem.zero_copy import ZeroCopy
from bml.transport.handshake.auth import Identity
from bml.transport.interface import Handler
from bml.transport.links.link import Link, LinkCallbacks, LinkConnection
from bml.transport.links.settings import LinkSettings
from bml.transport.links.transport import LinkTransport
from bml.transport.tcp.connection import TcpConnection
from bml.transport.tcp.incoming import Incoming
from bml.transport.tcp.zero_copy import ZeroCopyConnection, ZeroCopyIncoming


class TcpTransport(LinkTransport):
    """`Transport` over TCP; the other arguments are those of `LinkTransport`.

    With `zero_copy`, which it fences and closes, payloads stay where they are between servers of one host.
    """

    def __init__(
        self,
        identity: Identity,
        nics: Sequence[str],
        poller: Poller,
        handler: Handler,
        settings: LinkSettings | None = None,
        zero_copy: ZeroCopy | None = None,
    ) -> None:
        self._zero_copy = zero_copy
        super().__init__(identity, nics, poller, handler, settings)

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

    def _connection(self, link: Link, sock: socket.socket, callbacks: LinkCallbacks) -> LinkConnection:
        admit, received, heard, end = callbacks
        counters, max_nbytes, zero_copy = link.counters, self._settings.max_nbytes, self._zero_copy
        if zero_copy is None or not zero_copy.reads(link.peer):
            plain = Incoming(admit, received, counters, max_nbytes)
            return TcpConnection(sock, self._poller, link.queue, plain, heard, end)
        incoming = ZeroCopyIncoming(admit, received, counters, max_nbytes, zero_copy, link.peer)
        reference_for = partial(zero_copy.reference_for, link.peer)
        return ZeroCopyConnection(
            sock, self._poller, link.queue, incoming, heard, end, reference_for, counters
        )
