"""Calls the functions of the user that are to hear of a job, in a thread where they may take their time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_LOG = logging.getLogger("bml.cluster")

#: So much news waits at most for a function that is slow; of more the oldest is dropped.
_MOST_WAITING = 1000
#: No wait is longer, so that Ctrl-C ends it.
_POLL_S = 0.2

News = Callable[[dict[str, Any]], None]


def view_line(snapshot: dict[str, Any]) -> str:
    """The view of a snapshot in one line: its number, how many servers it has, and its reason."""
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
    """Tells `on_change` the snapshots of a job, in order, and whoever else is to hear something.

    A snapshot that waits is replaced by a newer one of the same view: slow functions miss steps, not views.
    What a function raises is kept as `error`; nothing is told after it.
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
        """Have `on_change` told. Any thread may call this, and never waits."""
        if self._on_change is not None:
            self._put(self._on_change, snapshot, (snapshot["term"], snapshot["epoch"]))

    def say(self, function: Callable[[str], None], text: str) -> None:
        """Have another function told something; in order with the snapshots."""
        self._put(function, text, object())

    def drain(self, within_s: float) -> None:
        """Wait until everything is told, at most so long."""
        if self._wait(lambda: self._telling or bool(self._waiting), within_s):
            _LOG.warning("on_change has not returned within %g s: it is not waited for", within_s)

    def close(self, within_s: float) -> None:
        """Tell nothing more, and wait until what is being told is, at most so long. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
        self._wait(lambda: self._telling, within_s)

    def _wait(self, goes_on: Callable[[], bool], within_s: float) -> bool:
        """Wait for the thread; returns whether it still goes on."""
        if threading.current_thread() is self._thread:
            return False  # what is being told wants to know
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
