"""Calls the user's functions that follow a job, in a thread of their own, where they may be slow."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_LOG = logging.getLogger("bml.cluster")

#: How many calls wait at most for a slow function; beyond, the oldest is dropped.
_MOST_WAITING = 1000
#: The longest single wait, in seconds: Ctrl-C is handled between two waits.
_POLL_S = 0.2

News = Callable[[dict[str, Any]], None]


def view_line(snapshot: dict[str, Any]) -> str:
    """Return a line about the view of a snapshot: its number, how many servers it has, and its reason."""
    return f"view {snapshot['epoch']}: {len(snapshot['members'])} servers ({snapshot['reason']})"


def log_views() -> News:
    """Make an `on_change` that logs a line for each view after the first, for users who gave none."""
    newest = 1

    def changed(snapshot: dict[str, Any]) -> None:
        nonlocal newest
        if snapshot["epoch"] > newest:
            newest = snapshot["epoch"]
            _LOG.warning("%s", view_line(snapshot))

    return changed


class Teller:
    """Calls `on_change` with the snapshots of a job, and other functions with texts, in order.

    A waiting snapshot is replaced by a newer one of the same view: slow functions miss steps, not views. If a
    function raises, the exception is kept as `error`, and no function is called any more.
    """

    def __init__(self, on_change: News | None):
        self._on_change = on_change
        self._waiting: deque[tuple[Callable[[Any], None], Any, object]] = deque(maxlen=_MOST_WAITING)
        self._changed = threading.Condition()
        self._telling = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def tell(self, snapshot: dict[str, Any]) -> None:
        """Let `on_change` be called with a snapshot. Any thread may do this, and never waits."""
        if self._on_change is not None:
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
                self._changed.wait(min(left_s, _POLL_S))
            return goes_on()

    def _put(self, function: Callable[[Any], None], what: Any, about: object) -> None:
        with self._changed:
            if self._closed or self.error is not None:
                return
            if self._waiting and self._waiting[-1][2] == about:
                self._waiting.pop()
            self._waiting.append((function, what, about))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bml-teller", daemon=True)
                self._thread.start()
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
