"""`bml status --wait` beside a job that is about to start."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bml.cli.status import status
from bml.cluster.launcher.jobsocket import JobSocket, folder
from bml.errors import FabricError


@pytest.mark.parametrize("chosen", [[], ["--job", "late"]])
def test_it_waits_for_a_job_and_for_its_first_view(
    chosen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    opened: list[JobSocket] = []
    said: list[dict[str, Any]] = [{"epoch": 0}, {"epoch": 1}, {"epoch": 2}]

    def start(_: float) -> None:
        if not opened:
            opened.append(JobSocket(folder() / "late.sock", lambda request: said.pop(0)))

    monkeypatch.setattr(time, "sleep", start)
    try:
        done = CliRunner().invoke(status, [*chosen, "--wait", "600", "--json"])
    finally:
        for each in opened:
            each.close()
    assert json.loads(done.output) == {"epoch": 2}


def test_without_it_no_job_is_an_error_that_says_how_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(status, [])
    assert isinstance(done.exception, FabricError)
    assert "bml status --wait" in str(done.exception)
