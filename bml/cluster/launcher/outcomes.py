"""Passes the results of jobs that this process waits for on to testing tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bml.cluster.launcher.result import Result

Watcher = Callable[[Result], None]

_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with the result of every job that is waited for meanwhile, also if the job failed."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell(result: Result) -> None:
    """Call all watchers with the result of a job that is over."""
    for watcher in _watchers:
        watcher(result)
