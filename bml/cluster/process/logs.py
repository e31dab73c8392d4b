"""Writes the logs of a server or coordinator in a thread, so that no loop waits for a stopped terminal."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time

from bml.errors import UsageError

_NAME = "bml"
#: How many records wait at most; more are dropped.
_MOST_WAITING = 1000
_LOOK_S = 0.01  # how often `drain` looks whether all is written
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_as_asked() -> None:
    """Write the logs of bml from the level in `BML_LOG` on to standard error, if it is set.

    Raises UsageError for a text that is no level.
    """
    name = os.environ.get("BML_LOG", "")
    if not name:
        return
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise UsageError(f"BML_LOG is {name!r}: give a level of Python's logging, such as INFO")
    logging.getLogger(_NAME).setLevel(level)
    if not logging.getLogger().handlers:
        logging.basicConfig(format=_FORMAT)


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
        log_as_asked()
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
