"""Real jobs with random faults: what their servers recorded replays to bit-equal states elsewhere."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest

import bml
from bml.errors import BmlError
from bml.protocol.record.recording import Recording, unpack
from bml.protocol.record.story import Told, explain, tell
from bml.sharedmem import segment

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

TRANSPORTS = ("tcp", "tcp") if segment.why_not() else ("tcp", "shm")
N_SERVERS = 4
PART_HEAD_NBYTES = 16
"""A packed part begins with the server, its incarnation and the length of what zlib has packed."""


def faults(chance: random.Random, transport: str) -> dict[str, Any]:
    """One or two faults within the first steps; after some of them a server comes again."""
    victim, other = chance.sample(range(N_SERVERS), 2)
    step = chance.randint(2, 20)
    kinds: list[dict[str, Any]] = [
        {"faults": [f"kill:{victim}@step={step}"]},
        {"faults": [f"kill:{victim}@step={step}", "coordinator@step=3"], "rejoin": True},
        {"faults": [f"freeze:{victim}@step={step},for=1.5s"], "rejoin": True, "detect_s": 0.5},
        {"faults": [f"leave:{other}@step={step}"]},
        {"absent": [victim], "faults": [f"join:{victim}@step={step}"]},
    ]
    if transport == "tcp":
        kinds += [
            {"faults": [f"blackhole:{victim}/0@step={step}"]},
            {"faults": [f"switch:0/1@step={step}"]},
        ]
    return chance.choice(kinds)


def replayed(recording: Recording) -> Told:
    """All states must be bit-equal."""
    told = tell(recording)
    for each in told.replays:
        assert each.equal, (each.server, [state.differs for state in each.checked if state.differs])
        assert each.inputs > 10
    return told


@pytest.mark.parametrize("seed", range(10))
def test_ten_jobs_with_random_faults_replay_to_bit_equal_states(seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"recorded {seed}")
    transport, file = TRANSPORTS[seed % 2], tmp_path / "job.bmlrec"
    befell = faults(chance, transport)
    train = partial(jobs.descend, padding=chance.choice((0, 20_000)), pause_s=0.01)
    result = jobs.launch(train, "bcube:2x2", transport=transport, record=file, **befell)
    recording = unpack(file.read_bytes())
    told = replayed(recording)
    assert {*result.values} <= told.recorded, befell
    members = {server for seen in told.views.values() for server in seen[0].record.view.members}
    lost = [each for each in result.gone if each in members and each not in result.values]
    for server in lost:
        lines = explain(told, f"server:{server}")
        assert len(lines) <= 20
        assert f"server:{server} went in view" in " ".join(lines), (befell, lines)
    for server in result.values:
        kept = zlib.decompress(result.reports[server].recording[PART_HEAD_NBYTES:])
        assert b"bcube:2x2" in kept
        for secret in (bytes(result.spec.token), result.value["params"].tobytes()):
            assert secret not in kept, "neither the token nor the training state is in it"


def endless(session: Any) -> None:
    vector = session.empty(1000)
    while True:
        session.allreduce(vector)


def raises(session: Any) -> None:
    for step in range(20):
        session.allreduce(session.empty(10))
        if step == 10 and session.server == 1:
            raise RuntimeError("no more")


def test_a_failed_job_has_a_recording_and_a_healthy_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    healthy = jobs.launch(partial(jobs.descend, epochs=1), "switch:2")
    assert healthy.recording == b""
    with pytest.raises(BmlError) as failed:
        jobs.launch(raises, "switch:2")
    replayed(unpack(failed.value.result.recording))  # type: ignore[attr-defined]
    assert not [*tmp_path.iterdir()]


def test_a_dump_of_a_running_job_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with bml.start(endless, "switch:3", launcher="processes", transport="tcp") as job:
        jobs.wait_for(lambda: all(each.get("step", 0) > 20 for each in job.status()["servers"].values()))
        done = job.dump()
        assert done["servers"] == [0, 1, 2]
        assert Path(done["file"]).parent == tmp_path / "bml"
        replayed(unpack(Path(done["file"]).read_bytes()))


def test_sigusr1_writes_the_file_that_bml_replay_reads(tmp_path: Path) -> None:
    script, file = tmp_path / "endless.py", tmp_path / "job.bmlrec"
    script.write_text(
        "def train(session):\n"
        "    for step in range(10**9):\n"
        "        session.allreduce(session.empty(1000))\n"
        "        if session.server == 0 and step == 50:\n"
        "            print('fifty steps', flush=True)\n"
    )
    bml_ = [sys.executable, "-m", "bml"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = [
        *bml_,
        "run",
        str(script),
        "--fabric",
        "switch:3",
        "--launcher",
        "processes",
        "--record",
        str(file),
    ]
    with subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert any("fifty steps" in line for line in process.stdout)
            process.send_signal(signal.SIGUSR1)
            assert any(str(file) in line for line in process.stderr)
        finally:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    said = subprocess.run(
        [*bml_, "replay", str(file), "--json"], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONHASHSEED": "2"},
    )  # fmt: skip
    answer = json.loads(said.stdout)
    assert answer["equal"]
    assert [each["server"] for each in answer["servers"]] == [0, 1, 2]
