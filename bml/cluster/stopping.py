"""Stops this very process with SIGSTOP, as a machine stands still that is paused: the fault `freeze`."""

from __future__ import annotations

import os
import signal
import subprocess


def stop_this_process(duration_s: float | None) -> None:
    """Stop this process for so many seconds, or for good (None).

    Somebody else must wake it, so a shell is left behind to do that.
    """
    if duration_s is not None:
        command = ["sh", "-c", f"sleep {duration_s}; kill -CONT {os.getpid()}"]
        # The process may be gone by then: nobody is to hear of that.
        subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)
