"""Stops this very process with SIGSTOP, as a machine stands still that is paused: the fault `freeze`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from bml.io.forks import no_fork

#: Wakes the process behind a pidfd, once it has been stopped for so long; ends when that process does.
_WAKER = """
import select, signal, sys
process, number, stopped_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def ends(within_s):
    return select.select([process], [], [], within_s)[0]
def is_stopped():
    with open(f"/proc/{number}/stat") as stat:
        return stat.read().rpartition(") ")[2][0] == "T"
while not is_stopped():
    if ends(0.001):
        sys.exit()
if not ends(stopped_s):
    signal.pidfd_send_signal(process, signal.SIGCONT)
"""


def stop_this_process(duration_s: float | None) -> None:
    """Stop this process for so many seconds, or for good (None).

    Another process must wake it, so one is left behind to do that. It holds nothing of this one, and
    ends when this one is killed: the number may soon be another's.
    """
    if duration_s is not None:
        this = os.pidfd_open(os.getpid())
        command = [sys.executable, "-ISc", _WAKER, str(this), str(os.getpid()), str(duration_s)]
        nowhere = subprocess.DEVNULL
        with no_fork():
            subprocess.Popen(
                command,
                pass_fds=[this],
                start_new_session=True,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
            )
        os.close(this)
    os.kill(os.getpid(), signal.SIGSTOP)
