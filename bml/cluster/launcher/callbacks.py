"""Calls the user's functions that follow a job, in a thread of their own, where they may be slow."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bml.io.interruptible import POLL_S, Condition

_LOG = logging.getLogger(__name__)

#: How many calls wait at most for a slow function; beyond, the oldest is dropped.
_MOST_WAITING = 1000

News = Callable[[dict[str, Any]], None]


def view_line(snapshot: dict[str, Any]) -> str:
    """Return a line about the view of a snapshot: its number, how many servers it has, and its reason."""
    return f"view {snapshot['epoch']}: {len(snapshot['members'])} servers ({snapshot['reason']})"


class ViewLog:
    """The default `on_change`: it logs a line for each view after the first, and never waits."""

    def __init__(self) -> None:
        self._newest = 1

    def __call__(self, snapshot: dict[str, Any]) -> None:
        """Log the view of a snapshot, if it is new and standard error has room."""
        if snapshot["epoch"] > self._newest:
            self._newest = snapshot["epoch"]
            if _has_room(2):
                with suppress(Exception):  # of a handler or filter of the user's
                    _LOG.warning("%s", view_line(snapshot))


def _has_room(descriptor: int) -> bool:
    """Whether a line can be written at once: a logger that waits holds a lock that exits need, too."""
    try:
        return bool(select.select([], [descriptor], [], 0)[1])
    except OSError:
        return False


class Teller:
    """Calls `on_change` (None: a `ViewLog`) with the snapshots of a job, and other functions with texts.

    A waiting snapshot is replaced by a newer one of the same view: slow functions miss steps, not views. If a
    function raises, the exception is kept as `error`, and no function is called any more.
    """

    def __init__(self, on_change: News | None):
        self._on_change = on_change or ViewLog()
        self._waiting: deque[tuple[Callable[[Any], None], Any, object]] = deque(maxlen=_MOST_WAITING)
        self._changed = Condition()
        self._telling = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def tell(self, snapshot: dict[str, Any]) -> None:
        """Let `on_change` be called with a snapshot. Any thread may do this, and never waits."""
        self._put(self._on_change, snapshot, (snapshot["term"], snapshot["epoch"]))

    def say(self, function: Callable[[str], None], text: str) -> None:
        """Let another function be called with a text, in order with the snapshots."""
        self._put(function, text, object())

    def drain(self, within_s: float) -> None:
        """Wait, for `within_s` seconds at most, until all calls are made."""
        if self._wait(lambda: self._telling or bool(self._waiting), within_s):
            _LOG.warning("on_change has not returned within %g s: it is not waited for", within_s)

    def close(self, within_s: float) -> None:
        """Make no more calls, and wait for the current one, `within_s` seconds at most. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        still_calls = self._wait(lambda: self._telling, within_s)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not still_calls:
            thread.join(within_s)

    def _wait(self, goes_on: Callable[[], bool], within_s: float) -> bool:
        """Wait while `goes_on()`; returns whether it still does."""
        if threading.current_thread() is self._thread:
            return False  # the function that is called waits for itself
        deadline = time.monotonic() + within_s
        with self._changed:
            while goes_on() and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left_s, POLL_S))
            return goes_on()

    def _put(self, function: Callable[[Any], None], what: Any, about: object) -> None:
        with self._changed:
            if self._closed or self.error is not None:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="bml-teller", daemon=True)
                thread.start()
                self._thread = thread
            if self._waiting and self._waiting[-1][2] == about:
                self._waiting.pop()
            self._waiting.append((function, what, about))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._telling = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                function, what, _ = self._waiting.popleft()
                self._telling = True
            try:
                function(what)
            except BaseException as error:
                with self._changed:
                    self.error, self._telling = error, False
                    self._waiting.clear()
                    self._changed.notify_all()
                return
