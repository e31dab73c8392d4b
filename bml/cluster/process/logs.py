"""Writes the logs of a server or coordinator in a thread, so that no loop waits for a stopped terminal."""

from __future__ import annotations

import logging
import queue
import threading
import time

_NAME = "bml"
#: How many records wait at most; more are dropped.
_MOST_WAITING = 1000
_LOOK_S = 0.01


class LogsAside(logging.Handler):
    """Passes records of our loggers to the root handlers of the process, in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="bml-logs", daemon=True)

    def start(self) -> None:
        """Begin to take records, until the process ends."""
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
        """Wait until all records are written, `within_s` seconds at most."""
        deadline = time.monotonic() + within_s
        while self._records.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        while True:
            record = self._records.get()
            try:
                logging.getLogger().callHandlers(record)
            except Exception:  # raised by a handler of the user
                self.handleError(record)
            finally:
                self._records.task_done()
