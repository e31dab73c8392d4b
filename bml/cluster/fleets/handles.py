"""Handles of processes on this machine, to kill processes that this one did not start.

The id of a process that has ended may soon belong to another process, even of another user. So a process is
named by its id and its start time, and held by a descriptor (pidfd), which never means another process.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_BEGAN = 19
"""Position of the start time in /proc/*/stat, behind the name of the process."""


class ProcessId(NamedTuple):
    """The name of a process, which no later process has. `began`: clock ticks since the machine started."""

    number: int
    began: int


def this_process() -> ProcessId:
    """Return the name of this process."""
    return process_id(os.getpid())


def process_id(number: int) -> ProcessId:
    """Return the name of the process with this id now. Raises OSError if there is none."""
    stat = Path(f"/proc/{number}/stat").read_text()
    return ProcessId(number, int(stat.rpartition(")")[2].split()[_BEGAN]))


class Handle:
    """Holds one process of this machine; without effect if it has ended. `close` releases it."""

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
        """Whether it has ended; waits for that up to `within_s` seconds."""
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
        """Release it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
