"""The trace: what it says of a job that runs, and how traces of several machines come onto one clock."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import bml
from bml.cluster.spec.trace import Event, ServerTrace, merged

ELEMENTS, STEPS = 1 << 16, 3


def train(session: bml.Session) -> float:
    import numpy as np

    return [float(session.allreduce(np.ones(1 << 16, np.float32))[-1]) for _ in range(3)][-1]


@pytest.mark.real
@pytest.mark.timeout(60)
def test_trace_of_a_job_accounts_for_every_byte_and_step() -> None:
    result = bml.launch(train, "bcube:2x2", launcher="processes", algorithm="bml", trace=True)
    assert set(result.values.values()) == {4.0}
    events = json.loads(json.dumps(result.trace))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in slices) == 0
    assert all(e["dur"] >= 0 for e in slices)
    for server in range(4):
        own = [e for e in slices if e["pid"] == server]
        assert Counter(e["name"] for e in own if e["name"].startswith("step")) == {
            f"step {number}": 1 for number in (1, 2, 3)
        }
        # BML on four servers: each receives 2·(n-1)/n of the vector, half of it sums and half results.
        for kind in ("sum", "result"):
            nbytes = sum(e["args"]["nbytes"] for e in own if e["name"] == kind)
            assert nbytes == STEPS * ELEMENTS * 4 * 3 // 4
        assert {names[server, e["tid"]] for e in own if e["name"] == "sum"} == {
            f"NIC {level} from server {server ^ (1 << level)}" for level in (0, 1)
        }
        # On one connection frames follow one another: their tracks must not overlap.
        for track in {e["tid"] for e in own if e["name"] == "sum"}:
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in own if e["tid"] == track)
            assert all(end <= begin + 0.002 for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.real
@pytest.mark.timeout(60)
def test_run_writes_a_trace(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def train(session):\n    session.barrier()\n")
    command = [sys.executable, "-m", "bml", "run", str(tmp_path / "script.py"), "--launcher", "processes"]
    file = tmp_path / "out.json"
    done = subprocess.run(
        [*command, "--fabric", "bcube:2x1", "--trace", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {e["pid"] for e in json.loads(file.read_text())["traceEvents"]} == {0, 1}


def event(start_s: float) -> Event:
    return Event(start_s, start_s + 0.5, 0, "step 1", {})


def times(*traces: ServerTrace) -> dict[int, float]:
    return {e["pid"]: e["ts"] for e in merged(traces)["traceEvents"] if e["ph"] == "X"}


def test_servers_of_one_machine_share_its_clock() -> None:
    a, b = ServerTrace(0, "x", 1000.0, [event(5.0)]), ServerTrace(1, "x", 1000.1, [event(5.25)])
    assert times(a, b) == {0: 0.0, 1: 250_000.0}


def test_machines_are_aligned_by_wall_clock() -> None:
    a, b = ServerTrace(0, "x", 1000.0, [event(5.0)]), ServerTrace(1, "y", 500.0, [event(505.5)])
    assert times(a, b) == {0: 0.0, 1: 500_000.0}


def test_a_job_without_a_trace_has_none() -> None:
    assert merged([]) == {"traceEvents": [], "displayTimeUnit": "ms"}
