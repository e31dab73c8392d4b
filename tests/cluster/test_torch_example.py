"""examples/train_torch.py on plain processes; needs PyTorch, which `make test` does not install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'bml[torch]')")
pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


def test_a_torch_model_trains_in_step_while_a_server_dies() -> None:
    command = [sys.executable, "-m", "bml", "run", "examples/train_torch.py", "--fabric", "bcube:2x2"]
    faults = ["--fault", "kill:1@step=20"]
    done = subprocess.run(
        [*command, "--launcher", "processes", "--json", *faults],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["samples"]["complete"]
    assert len(set(report["digests"].values())) == 1
    assert report["steps"] == 70
    assert min(value["accuracy"] for value in report["values"].values()) >= 0.95
