"""Acts of the coordinator's process, for faults that no server can apply to itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from bml.cluster.injection.freezing import stop_this_process
from bml.cluster.injection.registry import on_coordinator
from bml.faults import Fault


@on_coordinator("coordinator", does="has the coordinator killed")
def kill(fault: Fault, ask_launcher: Callable[[Fault], None]) -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


@on_coordinator("freeze", does="has the coordinator stopped")
def freeze(fault: Fault, ask_launcher: Callable[[Fault], None]) -> None:
    """Stop this process for a time, or for good."""
    stop_this_process(fault.duration_s)


@on_coordinator("join", does="has it started, to join")
def start_server(fault: Fault, ask_launcher: Callable[[Fault], None]) -> None:
    """Have the launcher start the server: it alone can."""
    ask_launcher(fault)
