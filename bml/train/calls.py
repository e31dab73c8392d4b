"""One call at a time, and none any more after one that an exception has left: what a session allows.

The handler of a signal may raise after most instructions of the main thread. Python does not look for
signals after loads, stores and jumps forward, so `__enter__` and `__exit__` call nothing once they have begun
to change what they guard. A call that an exception leaves is either recorded, or found torn by the next one.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import TracebackType
from typing import TypeVar

from bml.errors import SessionBroken
from bml.topology.errors import BmlError, UsageError

Value = TypeVar("Value")


def warn_user(text: str) -> None:
    """Warn of the line that the training function is at: the nearest outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


class Calls:
    """`with calls:` is a call that takes part in steps. An exception that leaves it breaks the session.

    What the others have summed meanwhile, and how far, nobody can know then: no call may be repeated.
    """

    def __init__(self) -> None:
        self._inside = 0
        """The thread that is in a call, also one that was torn; 0: none."""
        self._computes = False
        self._waiters = threading.Lock()
        self._broken_by: BaseException | None = None

    def check(self) -> None:
        """Raise what broke the session, if anything did: the job's error itself, or SessionBroken."""
        first = self._broken_by
        if isinstance(first, BmlError):
            raise first
        if first is not None:
            self._is_broken(f"{type(first).__name__} ")

    def __enter__(self) -> None:
        if self._broken_by is not None:
            self.check()
        me = get_ident()
        if self._inside:
            self._refuse(me)
        self._inside = me

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._broken_by is None:
            self._broken_by = error
        self._inside = 0

    @contextmanager
    def later(self) -> Iterator[None]:
        """`with calls:`, as soon as the threads before have what they want: for what several may wait for."""
        if self._inside == get_ident():
            self._refuse(self._inside)
        with self._waiters, self:
            yield

    def compute(self, function: Callable[[], Value]) -> Value:
        """Call a function of the user's inside of a call: it may make none."""
        self._computes = True
        try:
            return function()
        finally:
            self._computes = False

    def _refuse(self, me: int) -> None:
        if self._inside != me:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise UsageError(
                f"thread {names.get(me)!r} called the session while thread {names.get(self._inside)!r} is in "
                "a call: one thread makes all calls, one after the other"
            )
        if self._computes:
            raise UsageError("recompute made a call of the session: it may only compute")
        self._is_broken("")

    def _is_broken(self, by: str) -> None:
        raise SessionBroken(
            f"an exception {by}left an earlier call of this session, and the others may have committed its "
            "step: this server cannot go on, so let the training function end"
        ) from self._broken_by
