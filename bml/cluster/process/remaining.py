"""What a training function leaves under way when it returns, for which Python would wait at its end.

A server's process ends without Python's own end, as it is forked and must not run the exit handlers of its
parent. The last save or upload may be in a thread, an executor or an exit handler, so it waits for them as
Python does: for threads that are no daemons, executors and `atexit`; then it writes what files have in
buffers.
"""

from __future__ import annotations

import gc
import io
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from concurrent.futures.thread import _threads_queues
from contextlib import suppress

from bml.train.calls import warn_user

_PATIENCE_S = 5.0
"""After how long it is said for what a server that is done still waits."""
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class Remaining:
    """What begins in this process from now on; `run_exit_handlers` runs what it has given to `atexit`."""

    def __init__(self, run_exit_handlers: Callable[[], None]):
        self._run_exit_handlers = run_exit_handlers
        self._others = {*threading.enumerate()}

    def finish(self, name: str) -> None:
        """Wait until all is done, and warn in the name of this server if that takes long."""
        late = threading.Timer(_PATIENCE_S, self._warn, (name,))
        late.daemon = True
        with suppress(RuntimeError):  # no more threads may be started here
            late.start()
        try:
            self._finish()
        finally:
            late.cancel()

    def finish_within(self, within_s: float) -> None:
        """The same after an error, which may have left threads that wait for ever: for so long at most."""
        finishing = threading.Thread(target=self._finish, name="bml-remaining", daemon=True)
        with suppress(RuntimeError):
            finishing.start()
            finishing.join(within_s)

    def _finish(self) -> None:
        while threads := self._threads():
            for executor in _executors_of(threads):
                executor.shutdown()
            threads[0].join()
        self._run_exit_handlers()

    def _threads(self) -> list[threading.Thread]:
        new = {*threading.enumerate()} - self._others - {threading.current_thread()}
        # Python waits for those of executors even if they are daemons, as those that a daemon begins are.
        return [each for each in new if not each.daemon or each in _threads_queues]

    def _warn(self, name: str) -> None:
        waits_for = ", ".join(sorted(f"thread {each.name}" for each in self._threads()))
        warn_user(
            f"the training function of {name} has returned; its process waits, as Python does at its end, "
            f"for {waits_for or 'exit handlers'}"
        )


def _executors_of(threads: Iterable[threading.Thread]) -> set[Executor]:
    """Return the executors that work in these threads, which know them by weak references.

    One that has no thread has never had work; one that the program has let go of ends its threads itself.
    """
    found = set()
    for thread in threads:
        arguments = getattr(thread, "_args", None) or (None,)  # of a thread that runs
        reference = getattr(thread, "executor_reference", arguments[0])
        if isinstance(reference, weakref.ref) and isinstance(executor := reference(), Executor):
            found.add(executor)
    return found


def flush_files() -> None:
    """Write what the files that the program can still reach have in buffers.

    Only at the end of the process, when no thread of ours runs any more: a tuple that another thread is
    making (`tuple(x for x in …)`) must not be referred to, or Python raises a SystemError there
    (python/cpython issue 59313), and the list of all objects refers to it.
    """
    for file in [each for each in gc.get_objects() if issubclass(type(each), _BUFFERED)]:
        with suppress(Exception):  # it is closed, or its disk is full
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe may wait for its reader
                file.flush()
