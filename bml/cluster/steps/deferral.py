"""Defers the handlers of signals while a function runs that an exception of theirs would tear.

Python runs handlers in the main thread, between any two of its instructions. A function that must not be torn
is marked as `unbroken`. A signal that comes while such a function is on the main thread's stack is deferred:
its handler runs when that function has returned. So the mark costs nothing until a signal comes.
"""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal's makes enums, at ten times the cost
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeVar

Handle = Callable[[int, FrameType | None], Any]
Function = TypeVar("Function", bound=Callable[..., Any])

_UNBROKEN: set[CodeType] = set()
_WATCHED = tuple(
    int(number)
    for number in (
        signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
        signal.SIGTERM, signal.SIGCHLD, signal.SIGVTALRM, signal.SIGPROF,
    )
)  # fmt: skip
"""The signals that programs usually handle; each costs 20 ns a step, all 62 of Linux would cost 1.5 µs."""


def unbroken(function: Function) -> Function:
    """Mark a function in which no handler runs. Its caller calls `release`, also if the function raises."""
    _UNBROKEN.add(function.__code__)
    return function


class _Deferred:
    """In the place of a handler of the user's."""

    def __init__(self, deferral: Deferral, handler: Handle):
        self.deferral = deferral
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None and at.f_code not in _UNBROKEN:
            at = at.f_back
        if at is None:
            self.handler(number, frame)
        else:
            self.deferral.put_off(self.handler, number, frame)


class Deferral:
    """Puts handlers off while the main thread is in an unbroken function; `wake` ends its waiting in there.

    `came`: the deferred calls, in order; the caller of the unbroken function calls `release` if there are
    any.
    """

    def __init__(self, wake: Callable[[], None]):
        self.came: list[tuple[Handle, int, FrameType | None]] = []
        self._wake = wake
        self._main = threading.main_thread().ident
        self._seen: list[Any] = []

    def look(self) -> None:
        """Take over the handlers that were installed since; before an unbroken function is called.

        Those of unusual signals are taken over when others are: to look at them each time would cost more.
        """
        if [*map(getsignal, _WATCHED)] != self._seen and get_ident() == self._main:
            self._adopt()

    def put_off(self, handler: Handle, number: int, frame: FrameType | None) -> None:
        """Keep the call of a handler until `release`."""
        self.came.append((handler, number, frame))
        self._wake()

    def release(self) -> None:
        """Make the deferred calls. Raises the exception of a handler; the rest is then made next time."""
        while self.came:
            handler, number, frame = self.came.pop(0)
            handler(number, frame)

    def close(self) -> None:
        """Give the handlers back; without effect in other threads, where Python forbids it."""
        if get_ident() != self._main:
            return
        for number, handler in self._handlers():
            if isinstance(handler, _Deferred) and handler.deferral is self:
                signal.signal(number, handler.handler)

    def _adopt(self) -> None:
        for number, handler in self._handlers():
            if not (isinstance(handler, _Deferred) and handler.deferral is self):
                signal.signal(number, _Deferred(self, handler))
        self._seen = [*map(getsignal, _WATCHED)]

    def _handlers(self) -> list[tuple[int, Handle]]:
        handlers = [(int(number), getsignal(number)) for number in signal.valid_signals()]
        return [(number, handler) for number, handler in handlers if callable(handler)]
