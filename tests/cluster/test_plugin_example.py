"""How a user tests a training script of their own against faults; docs/guides/testing.md explains it."""

import time
from pathlib import Path

import numpy as np
import pytest

import bml
from bml.faults import FaultPlan

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

X = np.linspace(-1, 1, 360, dtype=np.float32)
Y = 3 * X - 2


def gradient(w, indices):
    """Summed over these samples, of the squared error of the line w[0]·x + w[1]."""
    x, error = X[indices], w[0] * X[indices] + w[1] - Y[indices]
    return np.array([(error * x).sum(), error.sum()], np.float32)


def fit_line(session, go_on=None):
    """The training script under test; after five steps it waits until the file `go_on` is there, if asked."""
    w = session.empty(2)
    w[:] = 0
    session.state(params=w)

    def again(indices):
        return gradient(w, indices)

    for number, batch in enumerate(session.batches(len(X), global_batch=72, epochs=20, seed=0)):
        while go_on is not None and number == 5 and not go_on.exists():
            time.sleep(0.01)
        w -= 0.5 * batch.allreduce(gradient(w, batch.indices), recompute=again)
    return w


def broken(result) -> set[str]:
    """What the servers agreed was broken, in any view: a fault that never struck tests nothing."""
    return {part for view in result.report["views"] for part in view["failures"]}


@pytest.fixture(scope="module")
def undisturbed() -> np.ndarray:
    return bml.launch(fit_line, "bcube:3x2", launcher="processes").value


@pytest.mark.faults(fabric="bcube:3x2", steps=100, count=2, kinds=("kill", "freeze", "cut", "switch"))
def test_any_two_faults_do_not_change_the_line(fault_plan: FaultPlan, undisturbed: np.ndarray) -> None:
    result = bml.launch(fit_line, "bcube:3x2", launcher="processes", faults=fault_plan)
    # The plugin sees to it that both struck. A switch that has lost a server before has two ends left, and a
    # dead link of either end explains its silence, too.
    assert broken(result)
    assert len(set(result.report["digests"].values())) == 1, "all survivors hold the same bits"
    assert result.report["samples"]["complete"], "every sample was used once in every epoch"
    np.testing.assert_allclose(result.value, undisturbed, rtol=1e-4)


@pytest.mark.faults("kill:4@step=50,phase=broadcast", "coordinator@step=50,phase=recovery")
def test_the_coordinator_dies_while_the_job_recovers(fault_plan: FaultPlan, undisturbed: np.ndarray) -> None:
    result = bml.launch(fit_line, "bcube:3x2", launcher="processes", faults=fault_plan)
    assert "server:4" in broken(result)
    assert sorted(result.values) == [0, 1, 2, 3, 5, 6, 7, 8]
    np.testing.assert_allclose(result.value, undisturbed, rtol=1e-4)


def test_a_fault_of_the_moment(undisturbed: np.ndarray, tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    # Over tcp no step can be made without the NIC, so its loss is noticed before the end.
    with bml.start(
        lambda session: fit_line(session, struck), "bcube:3x2", launcher="processes", transport="tcp"
    ) as job:
        job.inject("blackhole:2/0")
        struck.touch()
        result = job.wait()
    assert "link:2/0" in broken(result)
    np.testing.assert_allclose(result.value, undisturbed, rtol=1e-4)
