"""The web server of a page: aiohttp in one thread of the launcher, or of `bml status`, on loopback alone.

It asks the job for its status twice a second while somebody looks, and makes the page of it once for all. A
stream sends the newest page when its reader has taken the one before, so a slow reader gets fewer pages, and
costs neither memory nor time. A reader that takes nothing for ten seconds is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import resources
from typing import Any

from aiohttp import web

from bml.errors import BmlError
from bml.web.access import HEADERS, refusal
from bml.web.board import PARTS, Board

MOST_STREAMS = 64
STALLED_S = 10.0
"""A stream whose reader takes nothing for so long is closed."""
_BUFFER_NBYTES = 1 << 17
"""Of a stream in the kernel: a reader that stalls is noticed after so many bytes."""
_ALIVE_S = 15.0  # so that browsers and proxies see that the connection lives
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """Answers requests; all methods are called in its event loop.

    `fresh` brings the board up to date; `inject` injects a fault, None: that is not allowed.
    """

    def __init__(
        self,
        board: Board,
        fresh: Callable[[], Awaitable[None]],
        inject: Callable[[str], Awaitable[dict[str, Any]]] | None,
    ):
        self.token = secrets.token_urlsafe(16)
        self.watched = asyncio.Event()
        """Set while there are streams."""
        self.streams: dict[asyncio.BaseTransport, asyncio.Event] = {}
        """The connections of streams, each with what wakes it."""
        self._board, self._fresh, self._inject = board, fresh, inject
        self._idle = asyncio.Event()
        self._idle.set()
        self._files = {
            each.name: each.read_bytes() for each in (resources.files("bml.web") / "static").iterdir()
        }

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self._guard], client_max_size=4096)
        app.router.add_get("/", self._page)
        app.router.add_get("/api/status", self._status)
        app.router.add_get("/api/events", self._events)
        app.router.add_post("/api/inject", self._injected)
        app.router.add_get("/{name}", self._file)
        return app

    def changed(self) -> None:
        """Wake all streams."""
        for each in self.streams.values():
            each.set()

    async def over(self, within_s: float) -> None:
        """Wait until all streams have sent the last page, for so long at most."""
        self.changed()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), within_s)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        posts = request.method == "POST"
        given = request.headers.get("X-BML-Token", "") if posts else request.query.get("token", "")
        why = refusal(request.headers.get("Host", ""), request.headers.get("Origin"), given, self.token)
        if why:
            return web.Response(status=403, text=f"{why}\n", headers=HEADERS)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.reason}\n")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return self._answer("index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._answer(name)

    def _answer(self, name: str) -> web.Response:
        body = self._files[name]
        if name == "index.html":
            body = body.replace(b"{token}", self.token.encode())
            body = body.replace(b"{inject}", b"yes" if self._inject else b"no")
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        await self._fresh()
        parts = [b'"%s":%s' % (name.encode(), self._board.get(name) or b"null") for name in PARTS]
        return web.Response(body=b"{%s}" % b",".join(parts), content_type="application/json")

    async def _injected(self, request: web.Request) -> web.StreamResponse:
        if self._inject is None:
            return web.json_response({"error": "faults can be injected with --web-inject"}, status=403)
        try:
            asked = await request.json()
            fault = asked["fault"]
        except (ValueError, KeyError, TypeError):
            return web.json_response({"error": 'send {"fault": "kill:4"}'}, status=400)
        try:
            return web.json_response(await self._inject(str(fault)), dumps=_dumps)
        except BmlError as error:
            return web.json_response({"error": str(error)}, status=400)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if len(self.streams) >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{MOST_STREAMS} pages are open: close some")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        transport, wake = _bound(request), asyncio.Event()
        self.streams[transport] = wake
        self._idle.clear()
        self.watched.set()
        try:
            await response.prepare(request)
            await self._send_news(response, wake)
        except (ConnectionError, TimeoutError):
            _LOG.info("%s", "a stream is closed: its reader has gone, or takes nothing")
            transport.abort()
        finally:
            del self.streams[transport]
            if not self.streams:
                self.watched.clear()
                self._idle.set()
        return response

    async def _send_news(self, response: web.StreamResponse, wake: asyncio.Event) -> None:
        """Send what is new until the job is over. Raises TimeoutError if the reader takes nothing."""
        seen = 0
        await response.write(b"retry: 1000\n\n")
        while True:
            wake.clear()
            seen, news = self._board.since(seen)
            if news:
                await asyncio.wait_for(response.write(news), STALLED_S)
                continue
            if self._board.is_last:
                return
            try:
                await asyncio.wait_for(wake.wait(), _ALIVE_S)
            except TimeoutError:
                await asyncio.wait_for(response.write(b": \n\n"), STALLED_S)


def _bound(request: web.Request) -> asyncio.WriteTransport:
    """Keep little of a stream in memory, in the kernel and here; returns its transport."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
    transport.set_write_buffer_limits(high=_BUFFER_NBYTES)
    return transport


def _dumps(value: Any) -> str:
    return json.dumps(value, default=str)
