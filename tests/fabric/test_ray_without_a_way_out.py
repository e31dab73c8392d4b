"""A job on a Ray of its own on a machine without a way out shows no warning of Ray. Needs root."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from commands import begun, environment_in, left_of

from bml.fabric.network import obstacle

pytestmark = [
    pytest.mark.real,
    pytest.mark.ray,
    pytest.mark.timeout(120),
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="it needs unshare"),
]

TRAIN = """
def train(session):
    for _ in session.steps(3):
        session.barrier()
    return session.server
"""


def test_nothing_but_the_views_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    job = f"{sys.executable} -m bml run train.py --fabric bcube:2x1 --launcher ray --json"
    command = ("unshare", "--net", "sh", "-c", f"ip link set lo up && exec {job}")
    with begun(*command, cwd=tmp_path, env=environment_in(tmp_path)) as process:
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    assert [line for line in stderr.splitlines() if line and not line.startswith("view ")] == []
    assert left_of(tmp_path) == []
