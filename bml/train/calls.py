"""The guard of a session: one call at a time, and no further call after an exception has left one.

The handler of a signal may raise after most instructions of the main thread. Python does not look for
signals after loads, stores and jumps forward, so `__enter__` and `__exit__` call nothing once they have begun
to change the state of the guard. A call that an exception leaves is either recorded, or the next call finds
that it was torn.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import TracebackType
from typing import TypeVar

from bml.errors import SessionBroken
from bml.faults.busy import Slowdown
from bml.topology.errors import BmlError, UsageError

Value = TypeVar("Value")


def warn_user(text: str) -> None:
    """Warn of `text`, if there is any, with the line of the training function.

    That is the line of the nearest frame outside of this package.
    """
    if not text:
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


class Calls:
    """`with calls:` is a call that takes part in steps. An exception that leaves it breaks the session.

    It is unknown then which of its steps the others have committed, so no call may be repeated. Between two
    calls the training function computes, which a fault may slow down.
    """

    def __init__(self, slowdown: Slowdown | None = None) -> None:
        self.slowdown = slowdown or Slowdown(time.monotonic, time.sleep)
        self._inside = 0
        """Id of the thread that is in a call, also in a call that was torn; 0: no thread."""
        self._computes = False
        self._waiters = threading.Lock()
        self._broken_by: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        """Whether every later call raises an error."""
        return self._broken_by is not None

    def check(self) -> None:
        """Raise if the session is broken: the job's error itself, or SessionBroken for another exception."""
        first = self._broken_by
        if isinstance(first, BmlError):
            raise first
        if first is not None:
            self._is_broken(f"{type(first).__name__} ")

    def __enter__(self) -> None:
        if self.slowdown.active:
            self.check()  # a session that is broken has no time to lose
            self.slowdown.pause()
        if self._broken_by is not None:
            self.check()
        me = get_ident()
        if self._inside:
            self._refuse(me)
        self._inside = me

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.slowdown.active:
            self.slowdown.resume()
        if error is not None and self._broken_by is None:
            self._broken_by = error
        self._inside = 0

    @contextmanager
    def later(self) -> Iterator[None]:
        """Enter `with calls:` as soon as the threads before have left it: several threads may wait."""
        if self._inside == get_ident():
            self._refuse(self._inside)
        with self._waiters, self:
            yield

    def compute(self, function: Callable[[], Value]) -> Value:
        """Call a function of the user inside of a call. The function may make no call itself."""
        self._computes = True
        self.slowdown.resume()
        try:
            value = function()
            self.slowdown.pause()
            return value
        finally:
            self._computes = False

    def _refuse(self, me: int) -> None:
        if self._inside != me:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise UsageError(
                f"thread {names.get(me)!r} called the session while thread {names.get(self._inside)!r} is in "
                "a call: make all calls from one thread, one after the other"
            )
        if self._computes:
            raise UsageError("recompute or then called the session: they may only compute")
        self._is_broken("")

    def _is_broken(self, by: str) -> None:
        raise SessionBroken(
            f"an exception {by}left an earlier call of this session, and the others may have committed its "
            "step: this server cannot go on; let the training function end"
        ) from self._broken_by
