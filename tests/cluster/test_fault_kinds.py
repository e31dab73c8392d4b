"""Kinds of faults beyond the matrix, on plain processes: what they do, and that the job goes on."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.cluster.injection.server_acts import EXIT_STATUS
from bml.errors import StartError, TrainingError
from bml.faults import FaultPlan

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


def check_sound(result: bml.Result, steps: int = 40) -> None:
    assert result.report["steps"] == steps
    assert len(set(result.report["digests"].values())) == 1
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(steps // 5), rtol=1e-3, atol=1e-5)


def test_exit_ends_the_process_with_a_status() -> None:
    result = jobs.launch(jobs.descend, faults=FaultPlan.parse("exit:4@step=9"))
    check_sound(result)
    assert result.dead[4] == f"its process exited with status {EXIT_STATUS}"
    assert result.report["views"][1]["commit"] == 8


@pytest.mark.parametrize("phase", ["compute", pytest.param("reduce", marks=pytest.mark.smoke)])
def test_an_exception_ends_the_job_and_names_its_server(phase: str) -> None:
    with pytest.raises(TrainingError, match="server 4 raised InjectedError: injected by exc") as caught:
        jobs.launch(jobs.descend, faults=[f"exception:4@step=9,phase={phase}"])
    assert caught.value.server == 4
    assert "in descend" in str(caught.value)


def test_an_exception_ends_the_job_though_the_others_do_not_come_to_a_step() -> None:
    """They sleep in the user's code, where nobody tells them of an error."""

    def train(session: bml.Session) -> None:
        session.state(params=np.zeros(3))
        for step in session.steps(10):
            session.allreduce(np.ones(3))
            if step == 4:
                if session.server == 1:
                    raise ValueError("of the user's")
                time.sleep(1000)

    with pytest.raises(TrainingError, match="server 1 raised ValueError: of the user's"):
        jobs.launch(train, "bcube:2x2")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_server_that_holds_the_gil_is_awaited(transport: str) -> None:
    """For ten times as long as one that is stopped, also by a view that needs its answer."""

    def longer(session: bml.Session) -> dict[str, Any]:
        return jobs.descend(session, epochs=16, pause_s=0.05)  # its stand-in has started by then

    faults = ["gil:4@step=60,for=5s", "kill:2@step=60"]
    result = jobs.launch(longer, faults=faults, transport=transport, detect_s=0.5)
    check_sound(result, 80)
    assert sorted(result.values) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert sorted(result.dead) == [2]
    longest_s = max(metrics["step_max_s"] for metrics in result.report["metrics"].values())
    assert longest_s > 4.5, "it was not held"


@pytest.mark.parametrize("step", [1, 2])
def test_a_gil_held_during_the_first_steps_harms_nobody(step: int) -> None:
    """Imports and first kernels do that."""
    result = jobs.launch(jobs.descend, faults=[f"gil:4@step={step},for=1.5s"])
    check_sound(result)
    assert len(result.report["views"]) == 1


class Imports:
    """Something of a training function that takes long to be loaded, on one server only."""

    def __init__(self, lock: Path):
        self.lock = lock

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.lock,)


def _load(lock: Path) -> Path:
    with suppress(FileExistsError):
        lock.touch(exist_ok=False)
        time.sleep(4.5)
    return lock


def test_a_server_that_imports_for_long_is_waited_for(tmp_path: Path) -> None:
    """Until then it does not answer; it was given up after 4 x detect_s, and the job hung."""
    imports = Imports(tmp_path / "first")

    def train(session: bml.Session) -> float:
        assert Path(str(imports)).exists()
        return float(session.allreduce(np.ones(1))[0])

    result = jobs.launch(train, "bcube:2x2", detect_s=1.0)
    assert result.values == dict.fromkeys(range(4), 4.0)


def test_a_server_that_imports_for_too_long_is_named_as_soon_as_it_answers() -> None:
    """The coordinator had gone by then, and everybody waited for another one."""
    imports = Sleeps(4.5)

    def train(session: bml.Session) -> None:
        assert imports is None
        session.barrier()

    with pytest.raises(StartError, match=r"cannot start: server \d did not appear"):
        jobs.launch(train, "bcube:2x1", start_s=3.0, detect_s=0.2)


class Sleeps:
    """Something that takes so long to be loaded, on every server."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (self.seconds,)


def test_a_flapping_nic_is_left_out_and_nobody_is_lost() -> None:
    def train(session: bml.Session) -> dict[str, Any]:
        return jobs.descend(session, epochs=100, pause_s=0.03)

    result = jobs.launch(train, faults=["flap:4/0@step=9,every=6s,for=6s"], detect_s=1.5)
    check_sound(result, 500)
    assert len(result.values) == 9
    assert "NIC 4/0" in result.report["views"][1]["reason"]


def test_a_black_hole_that_ends_before_it_is_noticed_changes_no_view() -> None:
    result = jobs.launch(jobs.descend, faults=["blackhole:4/0@step=9,for=100ms"], detect_s=3.0)
    check_sound(result)
    assert len(result.report["views"]) == 1


def test_the_phase_decides_what_of_the_step_is_left() -> None:
    """Before its contribution has left, a killed server's share must be computed again by the others."""
    for phase, recomputed in (("compute", True), ("complete", None)):
        result = jobs.launch(jobs.descend, algorithm="bml", faults=[f"kill:4@step=9,phase={phase}"])
        check_sound(result)
        contributors = {step: who for step, who, _ in result.value["history"]}
        if recomputed:
            assert 4 not in contributors[9]


def test_a_server_killed_at_start_up_is_named_unless_fewer_are_enough() -> None:
    with pytest.raises(
        StartError, match=r"cannot start: server 4 is dead: its process (was killed by signal 9|is gone)"
    ):
        jobs.launch(jobs.descend, faults=["kill:4@phase=start"])
    result = jobs.launch(jobs.descend, faults=["kill:4@phase=start"], min_servers=8)
    check_sound(result)
    assert len(result.values) == 8


@pytest.mark.parametrize("fault", ["loss:4/0@step=9,share=1%", "node:4@step=9"])
def test_some_need_real_cables_and_machines(fault: str) -> None:
    with pytest.raises(bml.UsageError, match="needs real cables, or machines; run the job on an emulated"):
        jobs.launch(jobs.descend, faults=[fault])


def test_a_fault_strikes_in_its_step_however_short_steps_are() -> None:
    def train(session: bml.Session) -> int:
        for _ in range(2000):
            session.barrier()
        return 0

    result = jobs.launch(train, "bcube:2x2", faults=["kill:3@step=1000,phase=compute"])
    # Nothing is added in a barrier: if the others have come to step 1000, all who are left are complete.
    assert result.report["views"][1]["commit"] in (999, 1000)
