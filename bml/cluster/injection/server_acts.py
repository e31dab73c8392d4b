"""Acts on a server's own process and training function."""

from __future__ import annotations

import ctypes
import math
import os
import signal

from bml.cluster.injection.actuators import Actuators
from bml.cluster.injection.freezing import stop_this_process
from bml.cluster.injection.registry import on_server
from bml.faults import Fault
from bml.faults.kinds import BUSY_SHARE

EXIT_STATUS = 70
"""Status of a process that a fault `exit` ended."""


class InjectedError(RuntimeError):
    """The error that the fault `exception` raises in a training function."""


@on_server("kill", does="sends SIGKILL to its process")
def kill(fault: Fault, actuators: Actuators) -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


@on_server("exit", does=f"ends its process with status {EXIT_STATUS}")
def leave_process(fault: Fault, actuators: Actuators) -> None:
    """End this process without a word to anything."""
    os._exit(EXIT_STATUS)


@on_server("freeze", does="sends SIGSTOP to its process")
def freeze(fault: Fault, actuators: Actuators) -> None:
    """Stop this process for a time, or for good."""
    stop_this_process(fault.duration_s)


@on_server("exception", does="raises in its training function")
def throw(fault: Fault, actuators: Actuators) -> None:
    """Raise in the training function's next or current call."""
    actuators.throw(InjectedError(f"injected by {fault}"))


@on_server("gil", does="holds its interpreter's lock in a call of C")
def hold_gil(fault: Fault, actuators: Actuators) -> None:
    """Do as an extension that computes in C and keeps the lock: no thread of Python runs meanwhile."""
    ctypes.PyDLL(None).usleep(int((fault.duration_s or 0.0) * 1e6))


@on_server("busy", does="slows its training function down")
def slow_down(fault: Fault, actuators: Actuators) -> None:
    """Take a share of the time of the training function away."""
    duration_s = math.inf if fault.duration_s is None else fault.duration_s
    actuators.slowdown.begin(fault.settings.get("share", BUSY_SHARE), duration_s)


@on_server("leave", does="leaves before its next step")
def leave(fault: Fault, actuators: Actuators) -> None:
    """Ask this server to go after its step."""
    actuators.leave(f"asked to by {fault}")
