"""What Ctrl-C may interrupt without harm: a condition, an event, and a call in a thread of its own.

What a signal's handler raises in the main thread, such as KeyboardInterrupt, comes where Python has just
called something, or begins a function or another round of a loop. `with` of a lock calls nothing in Python:
the lock is held and will be released, or neither. The condition and the event of `threading`, and the futures
made of them, are entered by methods in Python: what is raised just before these return leaves the lock held
for ever, and a thread that ends a job would wait for it as long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from bml.io.signals import signals_put_off
from bml.topology.errors import UsageError

#: The longest single wait, in seconds: a signal just before a wait does not end it, and is handled after it.
#: It does end a join, which then takes the thread for ended (CPython 3.11), so events are waited for.
POLL_S = 0.2

_T = TypeVar("_T")
_RLock: type = type(threading.RLock())


class Condition(_RLock):  # type: ignore[misc]
    """As threading.Condition with a lock of its own: enter it, once, before you wait or notify."""

    def __init__(self) -> None:
        self._wakers: deque[threading.Lock] = deque()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait to be notified, `timeout_s` seconds at most; returns whether that was it."""
        if not self._is_owned():
            raise RuntimeError("a condition is waited for that was not entered")
        waker, state = threading.Lock(), (1, threading.get_ident())
        waker.acquire()
        self._wakers.append(waker)
        try:
            self.release()
            return waker.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
        finally:
            self._acquire_restore(state)  # unlike `acquire`, no signal interrupts it
            with suppress(ValueError):
                self._wakers.remove(waker)

    def wait_for(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until `predicate()`, `timeout_s` seconds at most; returns whether it is so."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (is_so := predicate()):
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return bool(is_so)

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        while self._wakers:
            with suppress(RuntimeError):  # an interrupt came here before it was removed
                self._wakers[0].release()
            with suppress(IndexError):
                self._wakers.popleft()


class Event:
    """As threading.Event; a thread that waits misses a `set` that `clear` follows at once."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake all threads that wait for it. Idempotent."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Let threads wait for the next `set`."""
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, `timeout_s` seconds at most; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_set, timeout_s)


class Aside(Generic[_T]):
    """A call of `function` in a thread of its own. An interrupt ends only the wait for it.

    With `or_here` it is called in the caller's thread where no more threads may be started.
    """

    def __init__(self, function: Callable[[], _T], name: str, *, or_here: bool = False):
        self._function, self._name, self._or_here = function, name, or_here
        self._is_started = False
        self._over = Event()
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the function has returned or raised."""
        return self._over.is_set()

    def start(self) -> Aside[_T]:
        """Begin the call; returns this object. Idempotent."""
        with signals_put_off():  # a thread whose start is interrupted may stop in its first lines
            if not self._is_started:
                self._is_started = True
                try:
                    threading.Thread(target=self._run, name=self._name).start()
                except RuntimeError as error:  # no more threads may be started
                    if self._or_here:
                        self._run()
                    else:
                        self._error = error
                        self._over.set()
        return self

    def result(self) -> _T:
        """Wait for the end of the call; returns what the function returned, or raises what it raised."""
        self.start()
        while not self._over.wait(POLL_S):
            pass
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()


def refuse_green_threads() -> None:
    """Raise UsageError if gevent or eventlet has replaced modules of Python in this process.

    Their threads run one at a time, and only where one of them waits: a server must be heard while its
    training function computes.
    """
    for library, module, replaced in (
        ("gevent", "gevent.monkey", "saved"),
        ("eventlet", "eventlet.patcher", "already_patched"),
    ):
        saved = getattr(sys.modules.get(module), replaced, {})
        names = sorted(name for name in saved if not name.startswith("_"))
        if names:
            raise UsageError(
                f"{library} has replaced {', '.join(names)} of Python in this process, and bml needs "
                f"Python's own: start the job from a program that lets {library} replace nothing"
            )
