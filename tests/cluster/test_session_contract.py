"""What a session promises, on real servers: docs/guides/training.md."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.cluster.spec.ending import NotSent
from bml.errors import StateMismatch, StepMismatch, UsageError
from bml.sharedmem import segment

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

FABRIC = "bcube:2x2"
TRANSPORTS = (
    "tcp",
    pytest.param("shm", marks=pytest.mark.skipif(bool(segment.why_not()), reason=segment.why_not() or "")),
)


def test_different_states_become_that_of_one_server_even_if_it_dies() -> None:
    def train(session: bml.Session) -> list[float]:
        a, b = np.full(1000, float(session.server)), np.full(3, float(session.server))
        session.state(params=[a, b])
        for _ in session.steps(5):
            session.barrier()
        return [float(a[0]), float(a[-1]), float(b[0])]

    for fault in ("kill:0@step=1", "kill:0@step=2", "kill:0@step=3", "kill:0@step=3,phase=broadcast"):
        values = jobs.launch(train, FABRIC, faults=[fault]).values
        assert set(values) >= {1, 2, 3}
        assert len({tuple(value) for value in values.values()}) == 1
        assert all(value in ([0.0] * 3, [1.0] * 3) for value in values.values()), (fault, values)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_overflow_is_a_result_whatever_numpy_is_told(transport: str) -> None:
    def train(session: bml.Session) -> list[float]:
        np.seterr(all="raise")
        large = np.full(70_000, np.finfo(np.float32).max, np.float32)
        found = [float(session.allreduce(large)[0]) for _ in range(3)]
        with pytest.raises(FloatingPointError):
            large + large
        return found

    assert jobs.launch(train, FABRIC, transport=transport).values == dict.fromkeys(range(4), [np.inf] * 3)


def test_a_call_that_one_server_could_not_make_is_taken_for_no_other() -> None:
    def train(session: bml.Session) -> None:
        with suppress(UsageError):
            session.allreduce(np.full(3, None if session.server == 1 else 100.0))
        raise AssertionError(f"wrong calls were summed: {session.allreduce(np.full(3, 200.0))}")

    with pytest.raises(StepMismatch, match="every server must make the same calls"):
        jobs.launch(train, FABRIC)


def pace_until(there: Path, session: bml.Session) -> None:
    """Take longer for a step until a joiner that never contributes has been there, and is heard of."""
    jobs.pace(session, 4, 0.05 if there.exists() else 0.25)


def telling(train: Any, there: Path) -> Any:
    """This training function; a joiner makes the file as it leaves it, with an error or without."""

    def told(session: bml.Session) -> Any:
        try:
            return train(session)
        finally:
            if session.joins:
                there.touch()

    return told


def test_a_joiner_that_ends_early_harms_nobody(tmp_path: Path) -> None:
    there = tmp_path / "there"

    def train(session: bml.Session) -> float:
        w = np.zeros(3)
        session.state(params=w)
        if session.joins:
            return -1.0
        for _ in session.steps(60):
            pace_until(there, session)
            w += session.allreduce(np.ones(3)) / len(session.contributors)
        return float(w[0])

    result = jobs.launch(telling(train, there), FABRIC, faults=["kill:3@step=5", "join:3@step=8"])
    assert there.exists()
    assert result.values == dict.fromkeys(range(3), 60.0)


def test_a_joiner_that_leaves_its_loop_gives_no_value_to_the_job(tmp_path: Path) -> None:
    there = tmp_path / "there"

    def train(session: bml.Session) -> float:
        w = np.zeros(3)
        session.state(params=w)
        for _ in session.steps(60):
            if session.joins:
                break
            pace_until(there, session)
            w += session.allreduce(np.ones(3)) / len(session.contributors)
        return float(w[0])

    result = jobs.launch(telling(train, there), FABRIC, faults=["kill:0@step=5", "join:0@step=8"])
    assert result.values[0] < 60.0
    assert result.value == 60.0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("empty", [np.zeros, None])
def test_parameters_that_were_bound_anew_are_given_to_no_joiner(
    transport: str, empty: Any, tmp_path: Path
) -> None:
    there = tmp_path / "there"

    def train(session: bml.Session) -> float:
        w = (empty or session.empty)(100_000, "float64")
        w[:] = 0
        session.state(params=w)
        for batch in session.batches(600, global_batch=10, epochs=1):

            def gradient(indices: Any, w: Any = w) -> Any:
                return (w - 1.0) * len(indices)

            w = w - 0.1 * batch.allreduce(gradient(batch.indices), recompute=gradient)
            pace_until(there, session)
        return float(w[0])

    result = jobs.launch(
        telling(train, there), FABRIC, transport=transport, faults=["kill:3@step=3", "join:3@step=6"]
    )
    assert result.values == pytest.approx(dict.fromkeys(range(3), 1 - 0.9**60))
    assert "`w = w - g` makes a new array" in result.dead[3]


@pytest.mark.parametrize("of_each", ["array", "length"])
def test_states_that_differ_are_given_to_no_joiner(of_each: str, tmp_path: Path) -> None:
    there = tmp_path / "there"

    def train(session: bml.Session) -> float:
        w, residual, log = np.zeros(3), np.zeros(1 << 20), [0] * 100_000
        session.state(params=w, residual=residual)
        session.state_fn("log", lambda value: log.__setitem__(slice(None), value), lambda: log)
        for _ in session.steps(60):
            if of_each == "array":
                residual += session.server
            else:
                log.extend([1] * session.server)
            w += session.allreduce(np.ones(3)) / len(session.contributors)
            pace_until(there, session)
        return float(w[0])

    seen = jobs.Seen()
    faults = ["kill:3@step=3", "join:3@step=6"]
    result = jobs.launch(telling(train, there), FABRIC, faults=faults, on_change=seen, rejoin=True)
    assert result.values == dict.fromkeys(range(3), 60.0)
    assert "StateMismatch" in result.dead[3]
    assert "another training state after step" in result.dead[3]
    assert not [each for each in seen.failures if each != "server:3"], "no NIC is to blame"


def test_values_behind_functions_reach_joiners_and_harm_nobody() -> None:
    def train(session: bml.Session) -> list[Any]:
        w, best = np.zeros(3), [np.float64(10.0)]
        generator = np.random.default_rng(3)
        session.state(params=w)
        session.state_fn("best", lambda value: best.__setitem__(0, value), lambda: best[0])
        session.state_fn(
            "random",
            lambda value: setattr(generator.bit_generator, "state", value),
            lambda: generator.bit_generator.state,
        )
        for _ in session.steps(150):
            jobs.pace(session, 4)
            w += session.allreduce(np.ones(3)) / len(session.contributors) * generator.integers(1, 9)
            best[0] = min(best[0], np.float64(1 / w[0]))
        return [float(w[0]), float(best[0])]

    result = jobs.launch(train, FABRIC, faults=["kill:3@step=5", "join:3@step=8"])
    assert len({tuple(value) for value in result.values.values()}) == 1
    assert set(result.values) == set(range(4))


def test_what_cannot_be_sent_is_said_and_the_server_has_ended_well() -> None:
    result = jobs.launch(lambda session: (session.barrier(), (each for each in ()))[1], "bcube:2x1")
    assert set(result.values) == {0, 1}
    assert isinstance(result.value, NotSent)
    assert "cannot be pickled" in result.value.why


def test_a_value_that_the_launcher_cannot_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("class Value: pass\n")

    def train(session: bml.Session) -> Any:
        sys.path.insert(0, str(tmp_path))
        session.barrier()
        return importlib.import_module("only_there").Value()

    result = jobs.launch(train, "bcube:2x1")
    assert set(result.values) == {0, 1}
    assert "ModuleNotFoundError" in result.value.why


def scaled(session: bml.Session, factor: float) -> float:
    return factor * float(session.allreduce(np.ones(1))[0])


def test_functions_of_functools_and_what_cannot_be_pickled() -> None:
    assert jobs.launch(partial(scaled, factor=0.5), "bcube:2x1").values == {0: 1.0, 1: 1.0}
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be sent to the servers.*lock"):
        jobs.launch(lambda session: lock, "bcube:2x1")


DIFFERENT = """
import numpy as np
def train(session):
    w = np.zeros(3)
    session.state(params=w)
    for _ in session.steps(3):
        session.barrier()
    w += session.server
    return float(w[0])
"""


def test_servers_that_end_with_different_parameters_end_in_an_error(tmp_path: Path) -> None:
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(DIFFERENT)
    names: dict[str, Any] = {}
    exec(DIFFERENT, names)
    with pytest.raises(StateMismatch, match="ended with different parameters"):
        jobs.launch(names["train"], "bcube:2x1")
    command = [
        sys.executable,
        "-m",
        "bml",
        "run",
        str(script),
        "--launcher",
        "processes",
        "--fabric",
        "bcube:2x1",
    ]
    done = subprocess.run(
        [*command, "--json", "--report", str(report)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads(report.read_text())
    assert printed["error"]["kind"] == "StateMismatch"
    assert printed["values"] == {"0": 0.0, "1": 1.0}
