"""SIGTERM to a server's process: the notice that its machine is about to be taken away."""

from __future__ import annotations

import os
import signal
import threading
from typing import Protocol


class Leaves(Protocol):
    """A server, or a spare that may become one."""

    def leave(self, why: str) -> None:
        """Leave the job, for this reason."""
        ...


def leave_on_sigterm(server: Leaves) -> None:
    """Let this server finish its step and leave at SIGTERM. A second SIGTERM acts as before.

    It has no effect outside of the main thread. A forked process inherits the handler: as no server, it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    process, before = os.getpid(), signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN:  # as in the process that it was forked from
        before = signal.SIG_DFL

    def preempted(number: int, frame: object) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, before)
        server.leave("it got SIGTERM, the notice that its machine is taken away")

    signal.signal(signal.SIGTERM, preempted)
