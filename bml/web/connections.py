"""How many connections a page holds: a stranger on this machine must not use up the launcher's descriptors.

A connection needs no token until its request is read. So only so many are held, and the oldest of those that
are not streams makes room for a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container

from aiohttp import web

MOST_CONNECTIONS = 96


class Connections:
    """Makes the protocol of each new connection of `server`; the transports in `kept` are never closed."""

    def __init__(self, server: web.Server, kept: Container[asyncio.BaseTransport]):
        self._server, self._kept = server, kept

    def __call__(self) -> asyncio.BaseProtocol:
        """Return a protocol, one that hangs up at once if there is no room."""
        transports = (each.transport for each in self._server.connections)  # the oldest first
        held = [each for each in transports if each is not None and not each.is_closing()]
        if len(held) >= MOST_CONNECTIONS:
            oldest = next((each for each in held if each not in self._kept), None)
            if oldest is None:
                return _Refused()
            oldest.abort()
        return self._server()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
