"""Faults of a plan that never struck are said by `bml run`, its report and the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

TRAIN = """
import numpy as np
def train(session):
    for _ in session.steps(8):
        session.allreduce(np.ones(10))
"""
OPTIONS = ["--launcher", "processes", "--fabric", "bcube:2x2", "--absent", "1", "--min-servers", "1"]
HERE = "server 0 was there already, or the job was over"


def test_run_says_which_faults_never_struck(tmp_path: Path) -> None:
    script, report = tmp_path / "short.py", tmp_path / "report.json"
    script.write_text(TRAIN)
    plan = (
        "kill:2@step=4 exit:2@step=7 kill:1@step=2 join:0@step=3 cut:3/0@step=2 kill:3@step=99 "
        "kill:0@t=60s kill:2@t=61s"
    )
    faults = [word for fault in plan.split() for word in ("--fault", fault)]
    done = subprocess.run(
        [sys.executable, "-m", "bml", "run", str(script), *OPTIONS, "--report", str(report), *faults],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    never = json.loads(report.read_text())["never_struck"]
    assert never == {
        "exit:2@step=7": "step 7 never came while server 2 was in the job",
        "kill:1@step=2": "step 2 never came while server 1 was in the job",
        "join:0@step=3": HERE,
        "kill:3@step=99": "step 99 never came while server 3 was in the job",
        "kill:0@t=60s": "the time 60 s after the first view never came while server 0 was in the job",
        "kill:2@t=61s": "the time 61 s after the first view never came while server 2 was in the job",
    }
    for text, why in never.items():
        assert f"the fault {text} never struck: {why}" in done.stderr
