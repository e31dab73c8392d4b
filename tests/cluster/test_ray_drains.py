"""A real Ray whose nodes are drained under a job."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import commands
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


def test_a_server_on_a_node_that_drains_leaves_in_time_and_comes_again_elsewhere() -> None:
    """One of the drains that benchmarks/ray_drains.py is there for; six Ray nodes take most of the time."""
    command = [sys.executable, "benchmarks/ray_drains.py", "--drains", "1"]
    with commands.begun(*command, cwd=ROOT, env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}) as process:
        stdout, stderr = process.communicate(timeout=280)
    assert process.returncode == 0, stdout + stderr
    assert re.search(r"^1 of 1 in time; left: median \d+\.\d\d s", stdout, re.MULTILINE), stdout
