"""Starts ranks as processes of their own, reads what they say, and sees what they leave behind."""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("rank_program.py")
_MARK = "RANKS_OF_A_TEST"
DEADLINE_S = 40.0


class Ranks:
    """The processes of one group over the store in `folder`; use it in a `with` statement."""

    def __init__(self, folder: Path, size: int, program: Path = _PROGRAM, **options: Any):
        self.folder, self.size = folder, size
        self._program, self._options = program, options
        self._mark = secrets.token_hex(8)
        self._changed = threading.Condition()
        self.said: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(size)}
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._readers: dict[int, threading.Thread] = {}
        self._before = set(os.listdir("/dev/shm"))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        self.wait_until(lambda: not self.living())

    def start(self, *ranks: int) -> None:
        for rank in ranks or range(self.size):
            self.processes[rank] = process = subprocess.Popen(
                [
                    sys.executable,
                    self._program,
                    self.folder,
                    str(rank),
                    str(self.size),
                    json.dumps(self._options),
                ],
                env={**os.environ, _MARK: self._mark},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._readers[rank] = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            self._readers[rank].start()

    def _read(self, rank: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with self._changed:
                    self.said[rank].append(json.loads(line))
                    self._changed.notify_all()

    def wait_until(self, holds: Any, within_s: float = DEADLINE_S) -> None:
        """Wait until something holds; looked at again after each line of a rank, and each 20 ms."""
        until_s = time.monotonic() + within_s
        with self._changed:
            while not holds():
                assert time.monotonic() < until_s, f"ranks said {self.last()}, ended with {self.codes()}"
                self._changed.wait(0.02)

    def codes(self) -> dict[int, int | None]:
        """Return the exit codes of the ranks, None for those that run."""
        return {rank: process.poll() for rank, process in self.processes.items()}

    def last(self) -> dict[int, Any]:
        return {rank: lines[-1:] for rank, lines in self.said.items()}

    def get(self, rank: int, key: str) -> list[Any]:
        """Return all that a rank said under this key."""
        return [line[key] for line in self.said[rank] if key in line]

    def wait_for(self, key: str, *ranks: int, n: int = 1, within_s: float = DEADLINE_S) -> None:
        """Wait until each of these ranks, or all, has said this so often."""

        def said() -> bool:
            return all(len(self.get(each, key)) >= n for each in ranks or range(self.size))

        self.wait_until(said, within_s)

    def end(self, rank: int) -> tuple[int, str]:
        """Wait for the end of a rank; returns its code and the text of its errors."""
        process = self.processes[rank]
        assert process.stderr is not None
        text = "" if process.stderr.closed else process.stderr.read()
        process.stderr.close()
        self._readers[rank].join(DEADLINE_S)  # all that it said is there then
        return process.wait(DEADLINE_S), text

    def stop_when_by(self, *contributors: int, n: int = 20) -> None:
        """Let endless ranks end, once these have made n more steps, the last with them as contributors."""
        enough = {rank: len(self.get(rank, "by")) + n for rank in contributors}

        def made(rank: int) -> bool:
            by = self.get(rank, "by")
            return len(by) >= enough[rank] and by[-1] == [*contributors]

        self.wait_until(lambda: all(made(rank) for rank in contributors))
        (self.folder / "bml-stop").touch()

    def coordinator(self, rank: int) -> int:
        return int(self.get(rank, "coordinator")[-1])

    def longest_gap_s(self, rank: int, since_s: float) -> float:
        """Return the longest time between two steps of a rank of which the later one is after `since_s`."""
        times = [line["at"] for line in self.said[rank] if "step" in line]
        return max(b - a for a, b in pairwise(times) if b > since_s)

    def check_sums(self) -> None:
        """Each sum is that of its contributors, the same on all ranks."""
        steps: dict[int, tuple[float, list[int]]] = {}
        for lines in self.said.values():
            for line in lines:
                if "step" in line:
                    assert line["same"]
                    assert line["sum"] == sum(each + 1 for each in line["by"]), line
                    assert steps.setdefault(line["step"], (line["sum"], line["by"])) == (
                        line["sum"],
                        line["by"],
                    )

    def living(self) -> list[int]:
        """Return all processes of these ranks that still run, and their children."""
        wanted, found = f"{_MARK}={self._mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if wanted in environment.split(b"\0") and state != "Z":
                    found.append(int(entry.name))
        return found

    def check_nothing_left(self) -> None:
        self.wait_until(lambda: not self.living(), within_s=5.0)
        left = set(os.listdir("/dev/shm")) - self._before
        assert not [name for name in left if "bml" in name]
        strangers = [each.name for each in self.folder.iterdir() if not each.name.startswith(("bml", "lock"))]
        assert not strangers
