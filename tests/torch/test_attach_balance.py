"""`bml.torch.attach` with shares by speed: the numbers of plain torch, also if a server dies."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from jobs_in_threads import N_CLASSES, N_FEATURES, initialised, on_servers, oracle, samples  # noqa: E402
from torch.nn import functional  # noqa: E402

import bml.torch  # noqa: E402
from bml.sim.programs.clock import CLOCK  # noqa: E402
from bml.sim.programs.faults import Faults  # noqa: E402
from bml.train.batches import BatchPlan  # noqa: E402

PLAN = BatchPlan(90, 24, 5, 3)
"""20 batches, of which those after the eighth are split by speed."""


def summed_loss(model: Any, batch: Any) -> Any:
    x, y = batch
    CLOCK.compute(len(x))
    return functional.cross_entropy(model(x), y, reduction="sum")


def model_and_optimizer() -> tuple[Any, Any]:
    model = initialised(torch.nn.Linear(N_FEATURES, N_CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def train(session: Any) -> Any:
    model, optimizer = model_and_optimizer()
    run = bml.torch.attach(session, model, optimizer, loss=summed_loss)
    sizes = []
    for batch in run.batches(samples(), global_batch=24, epochs=5, seed=3, balance=True):
        sizes.append(len(batch.indices))
        summed_loss(model, batch).backward()
        optimizer.step()
    return sizes, [parameter.detach().clone() for parameter in model.parameters()]


def test_batch_normalisation_gets_two_samples_on_the_slowest_server() -> None:
    def train(session: Any) -> list[int]:
        model = torch.nn.Sequential(
            torch.nn.Linear(N_FEATURES, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, N_CLASSES)
        )
        optimizer = torch.optim.SGD(initialised(model).parameters(), lr=0.1)
        run = bml.torch.attach(session, model, optimizer, loss=summed_loss)
        sizes = []
        for batch in run.batches(samples(), global_batch=30, epochs=5, seed=3, balance=True):
            sizes.append(len(batch.indices))
            summed_loss(model, batch).backward()
            optimizer.step()
        return sizes

    job = on_servers(train, 6, Faults(paces={2: (5.0,)}))
    assert not job.errors
    assert job.values[2][0] == 5
    assert job.values[2][-1] == 2


@pytest.mark.parametrize("kills", [{}, {0: (14, "brought")}])
def test_a_slow_server_gets_less_and_numbers_are_those_of_one_process(kills: Any) -> None:
    job = on_servers(train, 3, Faults(paces={1: (3.0,)}, kills=kills))
    assert not job.errors
    assert not job.violations
    assert len(set(job.digests.values())) == 1
    assert {each["complete"] for each in job.ledgers.values()} == {True}
    slow, fast = job.values[1][0], job.values[2][0]
    assert slow[0] == fast[0] == 8
    assert slow[10] < fast[10] / 2
    if not kills:
        assert sum(sizes[10] for sizes, _ in job.values.values()) == 24
    model, optimizer = model_and_optimizer()
    oracle(model, optimizer, summed_loss, PLAN)
    for found, wanted in zip(job.values[2][1], model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=2e-4, atol=1e-5)
