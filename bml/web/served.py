"""A page that is served while its job runs: `with ServedPage(port, inject) as page`."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from aiohttp import web

from bml.errors import BmlError, FabricError
from bml.io.forks import close_on_fork
from bml.io.interruptible import Event
from bml.topology import parse
from bml.web import model
from bml.web.board import Board
from bml.web.connections import Connections
from bml.web.faults import OFFERS
from bml.web.layout import layouts
from bml.web.site import Site
from bml.web.source import Source

PERIOD_S = 0.5
"""How often the job is asked for its status while somebody looks."""
_LAST_S = 1.0
"""How long the end of the job waits for streams to take the last page."""
_ENDING_S = 5.0  # open requests are cut off then
_NOTHING: dict[str, bytes] = {}
_LOG = logging.getLogger(__name__)
_LOG_HTTP = logging.getLogger(f"{__name__}.http")
_LOG_HTTP.addHandler(logging.NullHandler())
_LOG_HTTP.propagate = False  # what strangers send says nothing to the user of this terminal


class ServedPage:
    """The page of one job, in a thread of its own; `url` has the token.

    Opens the port at once, 0: a free one. Raises FabricError if it is taken. `injects`: whether the page may
    inject faults.
    """

    url: str

    def __init__(self, port: int, injects: bool):
        self._listening = _listen(port)
        self._injects = injects
        self._source: Source | None = None
        self._board = Board()
        self._starts = "The job starts"
        self._page = model.as_json(model.starting(self._starts, time.time()))
        self._pace = model.Pace()
        self._asked_at = 0.0
        self._is_over, self._failed = False, ""
        self._asking, self._showing = threading.Lock(), threading.Lock()
        self._workers = ThreadPoolExecutor(3, "bml-page")
        self._loop = asyncio.new_event_loop()
        self._ready = Event()
        self._site: Site | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="bml-page", daemon=True)
        self._thread.start()
        self._ready.wait()
        assert self._site is not None
        port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/?token={self._site.token}"

    def __enter__(self) -> ServedPage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.fail(error)
        finally:
            self.close()

    def say(self, text: str) -> None:
        """Show what is being started."""
        self._starts = text
        if self._source is None:
            self._ask(anyway=True)

    def follow(self, source: Source) -> None:
        """Show this job from now on."""
        self._source = source

    def end(self, outcome: dict[str, Any]) -> None:
        """Show for good how the job has ended (see bml.Job.outcome); what comes later changes nothing."""
        self._end(lambda page: model.ended(page, outcome))

    def leave(self, text: str) -> None:
        """Show for good what is known now, and say why nothing more will come: the job goes on."""
        self._end(lambda page: model.left(page, text), asks=False)

    def fail(self, error: BaseException) -> None:
        """Show for good that this error or interrupt has ended the job; what comes later changes nothing."""
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        text = "it was interrupted" if interrupted else str(error) or type(error).__name__
        outcome = {"ended_well": False, "interrupted": interrupted, "text": text}
        self._end(lambda page: model.ended(page, outcome), asks=False)

    def _end(self, last: Callable[[dict[str, Any]], dict[str, Any]], asks: bool = True) -> None:
        """Show the last page, made from the one before; `asks`: with the last views and events."""
        if self._is_over:
            return
        if asks:
            self._ask(anyway=True)
        self._show(last(self._page), is_last=True)

    def close(self) -> None:
        """Stop serving, once the streams have taken the last page, or a second later. Idempotent."""
        if self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_ENDING_S)
        self._workers.shutdown(wait=False, cancel_futures=True)

    # --- the thread of the page ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            with suppress(TimeoutError):
                self._loop.run_until_complete(_ended(self._loop))
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._site = Site(self._board, self._fresh, self._inject if self._injects else None)
        runner = web.AppRunner(
            self._site.app(),
            handle_signals=False,
            access_log=None,
            shutdown_timeout=_LAST_S,
            logger=_LOG_HTTP,
        )
        await runner.setup()
        assert runner.server is not None
        accepted = Connections(runner.server, self._site.streams)
        listening = await self._loop.create_server(accepted, sock=self._listening)
        self._show(self._page)
        self._ready.set()
        following = asyncio.create_task(self._follow(self._site))
        await self._stop.wait()
        following.cancel()
        await self._site.over(_LAST_S)
        listening.close()
        await runner.cleanup()

    async def _follow(self, site: Site) -> None:
        """Ask the job again and again, while there are streams."""
        while True:
            await site.watched.wait()
            await self._fresh()
            await asyncio.sleep(PERIOD_S)

    async def _fresh(self) -> None:
        await self._loop.run_in_executor(self._workers, self._ask)

    async def _inject(self, spec: str) -> dict[str, Any]:
        source = self._source
        if source is None or self._is_over:
            raise FabricError("no job runs now")
        return await self._loop.run_in_executor(self._workers, source.inject, spec)

    # --- other threads ---------------------------------------------------------------------------

    def _ask(self, anyway: bool = False) -> None:
        """Ask the job and make its page, unless that was just done (then `anyway`), or the job is over."""
        with self._asking:
            now_s = time.time()
            is_new = 0 <= now_s - self._asked_at < PERIOD_S / 2 and not anyway
            if self._is_over or is_new:
                return
            if self._source is None:
                self._show(model.as_json(model.starting(self._starts, now_s)))
                return
            try:
                status = self._source.status()
                self._asked_at = now_s
                page = model.as_json(model.page_of(status, self._pace, now_s))
                self._show(page, {"fabric": _fabric(status["fabric"]), "history": _history(status)})
            except BmlError as error:
                _LOG.info("no status for the page: %s", error)
            except Exception as error:  # of a status that this version does not know; the job is well
                if repr(error) != self._failed:  # said once
                    _LOG.warning("the page could not be made", exc_info=True)
                self._failed = repr(error)

    def _show(self, page: dict[str, Any], parts: dict[str, bytes] = _NOTHING, is_last: bool = False) -> None:
        """Put a page, and other parts, on the board, in the thread of the page; none after the last one."""
        encoded = {**parts, "page": _encoded(page)}
        with self._showing, suppress(RuntimeError):  # the loop is closed: nobody looks any more
            if not self._is_over:
                self._page, self._is_over = page, is_last
                self._loop.call_soon_threadsafe(self._put, encoded, is_last)

    def _put(self, parts: dict[str, bytes], is_last: bool) -> None:
        self._board.put(parts, is_last)
        if self._site is not None:
            self._site.changed()


async def _ended(loop: asyncio.AbstractEventLoop) -> None:
    """End what still serves streams that stall; for a second at most."""
    left = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), _LAST_S)


def _listen(port: int) -> socket.socket:
    listening = close_on_fork(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
        raise FabricError(f"port {port} of 127.0.0.1 {why}; --web alone takes a free one") from None
    listening.setblocking(False)
    return listening


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode()


def _history(status: dict[str, Any]) -> bytes:
    views = [{**each, "members": len(each["members"])} for each in status.get("views", [])]
    return _encoded({"views": views, "events": status.get("events", [])})


@lru_cache(maxsize=4)
def _fabric(name: str) -> bytes:
    """The drawing of a fabric, and the faults that its parts can have."""
    offers = {part: [asdict(each) for each in offered] for part, offered in OFFERS.items()}
    return _encoded({"layouts": [asdict(each) for each in layouts(parse(name))], "offers": offers})
