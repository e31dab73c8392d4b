"""Ends a forked process: its daemonic children first, and without running exit handlers of its parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import NoReturn

from bml.io.limits import PROCESS_LIMIT, is_process_limit

#: How long daemonic children may take to end once they are asked to, in seconds; then they are killed.
_CHILDREN_S = 1.0


def end_children() -> None:
    """End the children that this process started with multiprocessing, as Python does at its end.

    Daemonic children are terminated, pools and managers are closed; after a second, daemonic children are
    killed. Other children go on and are not waited for.
    """
    # In a thread, as a finalizer may wait for a child that does not react.
    ending = threading.Thread(
        target=util._exit_function,  # type: ignore[attr-defined]
        kwargs={"active_children": _daemons},
        name="bml-exiting",
        daemon=True,
    )
    with suppress(RuntimeError):  # no more threads may be started here
        ending.start()
        ending.join(_CHILDREN_S)
    for child in _daemons():
        child.kill()


def _daemons() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.daemon]


def end_process(error: BaseException | None) -> NoReturn:
    """End this forked process as one that raised this error, without the exit handlers of its parent."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        status = 1
        if is_process_limit(error):
            print(f"a process of the job ends: {PROCESS_LIMIT}", file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    try:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(status)
