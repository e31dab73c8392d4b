"""Processes beside the command's own, for work that keeps every core busy."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from bml.io.signals import signals_put_off
from bml.topology.errors import FabricError

Result = TypeVar("Result")

_HEEDS_S = 0.1
"""So long an interrupt may wait until it is heeded."""
_COLLECT_AFTER = 50_000
"""Simulations make millions of objects that are in no circle: Python's 700 cost a twelfth of the time."""


@contextmanager
def workers(n: int) -> Iterator[Executor]:
    """Start so many, and end them at last, at once if the command fails.

    Ctrl-C reaches all processes of a terminal. In these it is blocked, and the command's own ends them. They
    end, too, if that is killed. Raises FabricError if one of them was killed.
    """
    before = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")
    pool = _Pool(n, spawn, _begin)
    try:
        _start(pool, n)
        yield pool
    except BaseException as error:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        if isinstance(error, BrokenProcessPool):
            raise FabricError("a process that shared the work was killed: is the memory used up?") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class _Pool(ProcessPoolExecutor):
    """An interrupt while a lock of its queue is taken would leave it held; its thread would wait for ever."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with signals_put_off():
            return super().submit(fn, *args, **kwargs)


def finished(futures: Iterable[Future[Result]]) -> Iterator[Future[Result]]:
    """Yield each as it is done. An interrupt is heeded between two looks, when no future's lock is held."""
    left = set(futures)
    while left:
        with signals_put_off():
            done, left = wait(left, _HEEDS_S, FIRST_COMPLETED)
        yield from done


def _start(pool: Executor, n: int) -> None:
    """Start all processes, with SIGINT blocked: they inherit that, so it ends none in an import either.

    Python tells it to the main thread whichever thread has got it, so it is held back until all have started.
    """
    with signals_put_off():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(n):
                pool.submit(int)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _begin() -> None:
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    gc.set_threshold(_COLLECT_AFTER)


def _end_with_the_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os._exit(1)
