"""The processes that a benchmark starts. Each has one compute thread, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bml.cluster.process.imports import what_we_import
from bml.lab.bench.host import RankError

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_END_S = 5.0
_LINES = 3


class Children:
    """The processes of one contender `who`. Each has a session of its own; prints go to `folder`."""

    def __init__(self, who: str, folder: Path):
        self.who = who
        self._log = folder / f"{who}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start one more process."""
        threads = dict.fromkeys(_THREADS, "1")
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **threads, **what_we_import(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        self._processes.append(process)

    def check(self) -> None:
        """Raise RankError, with its last lines, if a process has ended."""
        for process in self._processes:
            if process.poll() is not None and not self._closing:
                raise RankError(f"{self.who} ended with status {process.returncode}: {self._last_words()}")

    def close(self) -> None:
        """Wait until all processes have ended, and kill those that do not end. Idempotent."""
        self._closing = True
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip("-^~ ")]
        return " | ".join(lines[-_LINES:]) or "it printed nothing"
