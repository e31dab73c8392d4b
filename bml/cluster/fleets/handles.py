"""Processes of this machine that are killed by somebody who did not start them.

The number of a process that has ended may soon be another's, of another user even. So a process is named by
its number and by when it began, and is held by a descriptor (pidfd), which never means another.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_BEGAN = 19
"""Position in /proc/*/stat, behind its name, of when a process began."""


class ProcessId(NamedTuple):
    """A process, and no other that has its number later. `began`: clock ticks since the machine started."""

    number: int
    began: int


def this_process() -> ProcessId:
    """What this process is called."""
    return process_id(os.getpid())


def process_id(number: int) -> ProcessId:
    """What the process is called that has this number now. Raises OSError if there is none."""
    stat = Path(f"/proc/{number}/stat").read_text()
    return ProcessId(number, int(stat.rpartition(")")[2].split()[_BEGAN]))


class Handle:
    """Holds one process of this machine; has no effect if that has ended. `close` lets go of it."""

    def __init__(self, process: ProcessId):
        self._descriptor = -1
        with suppress(OSError):  # it has ended
            descriptor = os.pidfd_open(process.number)
            try:
                same = process_id(process.number) == process
            except OSError:
                same = False
            if same:
                self._descriptor = descriptor
            else:
                os.close(descriptor)

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether it has ended; waits for that up to `within_s`."""
        if self._descriptor < 0:
            return True
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def kill(self) -> None:
        """Kill it, frozen or not."""
        if self._descriptor >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
