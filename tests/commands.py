"""Commands that tests start as a user does, to look at them, to end them, and to see what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


@contextmanager
def begun(*command: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A command with pipes and a session of its own; nothing of it outlives the test, however that ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **settings
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_family(process)


def kill_family(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a process and all below it; Ray drains for 30 s when it is asked nicely."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate(timeout=30)
    psutil.wait_procs(family, timeout=10)


def interrupt(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal as a terminal does, to the whole group, or as whoever ends one process does."""
    if number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
