"""Commands that tests start as a user does, look at and end; and checks that they leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bml.cluster.process.imports import what_we_import


@contextmanager
def begun(*command: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A command with pipes and a session of its own; nothing of it outlives the test, however that ends."""
    pipe = subprocess.PIPE
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **settings
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_family(process)


def found_by(program: str, folder: Path, launcher: str, within_s: float) -> dict[str, Any]:
    """Run a program with a launcher and its folder as arguments; return its last line, from JSON."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, str(folder / "program.py"), launcher, str(folder)]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with begun(*command, env=environment) as process:
        stdout, stderr = process.communicate(timeout=within_s)
    assert process.returncode == 0, stderr
    found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return found


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
    """Send a signal to the whole group, as a terminal does, or to one process."""
    if number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


def running(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that waits to be buried by init has."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [each for each in family if runs(each)]


def environment_in(folder: str | Path, **settings: str) -> dict[str, str]:
    """Environment of a command that imports what the tests do, and whose processes `left_of` finds."""
    return {**os.environ, "TMPDIR": str(folder), **what_we_import(), **settings}


def left_of(folder: str | Path, within_s: float = 10.0) -> list[str]:
    """Commands of the processes that still run, after so long, of those that were begun with this TMPDIR."""
    mark = f"TMPDIR={folder}".encode()
    deadline = time.monotonic() + within_s
    while found := [each for each in psutil.process_iter() if mark in _environment(each)]:
        if time.monotonic() > deadline:
            return [f"{each.pid} {each.status()} {' '.join(each.cmdline())}" for each in found]
        time.sleep(0.05)
    return []


def _environment(process: psutil.Process) -> list[bytes]:
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []
