"""The processes that a benchmark starts. Each has one compute thread, and none is left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from bml.cluster.process.imports import what_we_import
from bml.cluster.process.starting import start_agent
from bml.lab.bench.host import RankError

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_END_S = 5.0
_LINES = 3


class Children:
    """The processes of one contender `who`. Each has a session of its own; prints go to `folder`."""

    def __init__(self, who: str, folder: Path):
        self.who = who
        self._log = folder / f"{who}.log"
        self._agent = start_agent(os.environ)
        self._n_started = self._n_running = 0

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start one more process."""
        whole = {**dict.fromkeys(_THREADS, "1"), **what_we_import(), **(environment or {})}
        with self._log.open("ab") as log:
            self._agent.send(
                {"do": "start", "name": self._n_started, "command": [*command], "environment": whole},
                [log.fileno()] * 2,
            )
        self._n_started += 1
        self._n_running += 1

    def check(self) -> None:
        """Raise RankError, with its last lines, if a process has ended."""
        if self._n_running and (ended := self._ended(0.0)):
            raise RankError(f"{self.who} {ended}: {self._last_words()}")

    def close(self) -> None:
        """Wait until all processes have ended, and kill those that do not end. Idempotent."""
        deadline = time.monotonic() + _END_S
        while self._n_running and self._ended(deadline - time.monotonic()):
            pass
        self._n_running = 0
        self._agent.hang_up()

    def _ended(self, within_s: float) -> str:
        """Wait for the end of a process: how it ended, empty if none does in time."""
        if not wait([self._agent.sock], max(0.0, within_s)):
            return ""
        message = self._agent.receive()
        if message is None:
            self._n_running = 0
            return "was killed with all of its processes"
        self._n_running -= 1
        if message["is"] == "cannot":
            return f"cannot start ({message['why']})"
        return f"ended with status {message['code']}"

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip("-^~ ")]
        return " | ".join(lines[-_LINES:]) or "it printed nothing"
