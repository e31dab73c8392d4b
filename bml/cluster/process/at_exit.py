"""Ends what a program has left open, at its end."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


class AtExit:
    """Calls `end` when the program ends, in this process, unless cancelled.

    What was registered later runs earlier: make it after whatever `end` needs, such as a connection to Ray.
    """

    def __init__(self, end: Callable[[], None]):
        self._end, self._process = end, os.getpid()
        atexit.register(self._run)

    def cancel(self) -> None:
        """Call nothing. Idempotent."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        if os.getpid() != self._process:  # a forked child that ends as a program does
            return
        try:
            self._end()
        except Exception as error:
            _LOG.warning("what the program left open did not end well: %s", error)
