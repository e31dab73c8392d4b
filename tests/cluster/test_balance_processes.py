"""Shares by speed in real processes. Computation is a sleep per sample, so that two processors suffice."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import bml
from bml.train.batches import BatchPlan

pytestmark = pytest.mark.real

N_SAMPLES, GLOBAL_BATCH = 48, 24
PER_SAMPLE_S = 0.005
SLOW = 1
MOST_EPOCHS = 400


def train(session: bml.Session) -> dict[str, Any]:
    """Compute until the slow server has less, then let it recover, and end when it has as much as others.

    All servers see the same shares, so they come to the same decisions.
    """
    w = np.zeros(4)
    session.state(params=w)
    found: list[list[int]] = []
    phases: list[int] = []
    for batch in session.batches(
        N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=MOST_EPOCHS, seed=2, balance=True
    ):

        def gradient(indices: Any) -> Any:
            slow = 2 if session.server == SLOW and not phases else 1
            time.sleep(len(indices) * PER_SAMPLE_S * slow)
            return np.full(4, float(indices.sum()))

        w += batch.allreduce(gradient(batch.indices), recompute=gradient)
        parts = session.all_gather(np.array(len(batch.indices)))
        sizes = [0 if part is None else int(part) for part in parts]
        found.append(sizes)
        there = [size for size in sizes if size]
        if not phases:
            if sizes[SLOW] < min(size for server, size in enumerate(sizes) if size and server != SLOW):
                phases.append(batch.whole.step)
        elif max(there) - min(there) <= 1 and sizes[2] == 0:
            phases.append(batch.whole.step)
            break
    return {"sizes": found, "phases": phases, "w": w}


@pytest.mark.timeout(150)
def test_a_slow_server_gets_less_until_it_recovers_and_nothing_is_computed_twice() -> None:
    result = bml.launch(train, "bcube:2x2", launcher="processes", faults=["kill:2@step=40"])
    assert not result.never_struck
    assert sorted(result.values) == [0, 1, 3]
    value = result.value
    assert len(value["phases"]) == 2
    assert value["sizes"][0] == [6, 6, 6, 6]
    assert value["sizes"][-1] == [8, 8, 0, 8]
    n_batches = len(value["sizes"])
    means = [np.mean(whole) for whole in batches(n_batches)]
    np.testing.assert_allclose(value["w"], np.sum(means), rtol=1e-12)  # all samples are in every mean
    assert len(set(result.report["digests"].values())) == 1
    (loop,) = result.report["samples"]["loops"]
    assert loop["left_out"] == 0
    assert all(epoch["complete"] for epoch in loop["epochs"][:-1])
    assert result.report["steps"] == 2 * n_batches


def batches(n: int) -> list[Any]:
    plan = BatchPlan(N_SAMPLES, GLOBAL_BATCH, MOST_EPOCHS, 2)
    return [plan.batch(step).indices for step in range(n)]
