"""Hides the paragraph that Ray prints for every worker that dies: the launcher says the same in one line.

See `bml.cluster.launcher.callbacks.ViewLog`, and `bml run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

HIDDEN = "^A worker died or was killed while executing a task"
_SETTING = "RAY_DEDUP_LOGS_SKIP_REGEX"


@contextmanager
def quiet_ray() -> Iterator[None]:
    """Import Ray in this context for the first time, and it prints nothing about dead workers.

    Ray reads the setting while it is imported, so the setting is in this process's environment only then. A
    setting of the user is kept, and then that holds.
    """
    if _SETTING in os.environ:
        yield
        return
    os.environ[_SETTING] = HIDDEN
    try:
        yield
    finally:
        os.environ.pop(_SETTING, None)  # another thread, with a job of its own, may have been first
