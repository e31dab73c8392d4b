"""Logs of a server or coordinator, written by a thread: no loop waits for a terminal that is stopped."""

from __future__ import annotations

import logging
import queue
import threading
import time

_NAME = "bml"
#: So much waits at most; what is more is dropped.
_MOST_WAITING = 1000
_LOOK_S = 0.01


class LogsAside(logging.Handler):
    """Hands what our loggers say to the handlers that the process has for everything, in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="bml-logs", daemon=True)

    def start(self) -> None:
        """Begin; until the process ends."""
        logger = logging.getLogger(_NAME)
        logger.addHandler(self)
        logger.propagate = False
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; never waits."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            return

    def drain(self, within_s: float) -> None:
        """Wait until everything is written, at most so long."""
        deadline = time.monotonic() + within_s
        while self._records.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        while True:
            record = self._records.get()
            try:
                logging.getLogger().callHandlers(record)
            except Exception:  # of a handler that is the user's
                self.handleError(record)
            finally:
                self._records.task_done()
