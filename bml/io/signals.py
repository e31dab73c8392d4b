"""Puts signals off while code runs in which what their handlers raise would be lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Noted:
    """A signal's handler that only notes that the signal came; `heed` calls the one in whose place it is."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self._handler = handler
        self._came: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came = number

    def heed(self) -> None:
        number, self._came = self._came, None
        if number is not None:
            self._handler(number, None)


@contextmanager
def signals_put_off() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait for the end of this context; of contexts in it, for the innermost.

    It is for C code that calls Python back: what a handler raises there is printed and lost. In other
    threads than the main one, which no signal interrupts, it does nothing.
    """
    noted: dict[signal.Signals, tuple[Any, _Noted]] = {}
    came: list[BaseException] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if callable(before):  # else the signal ends the process, or does nothing
                noted[number] = before, before if isinstance(before, _Noted) else _Noted(before)
    try:
        for number, (_, handler) in noted.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, (before, handler) in noted.items():
            try:
                signal.signal(number, before)
                handler.heed()
            except BaseException as error:  # the other signals' handlers are to be called, too
                came.append(error)
        if came:
            raise came[0]
