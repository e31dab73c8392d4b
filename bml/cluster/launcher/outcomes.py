"""Tells tools for tests of the results of the jobs that this process waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bml.cluster.launcher.result import Result

Watcher = Callable[[Result], None]

_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with the result of every job that is waited for meanwhile, also of one that failed."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell(result: Result) -> None:
    """A job is over."""
    for watcher in _watchers:
        watcher(result)
