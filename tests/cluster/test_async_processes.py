"""Steps beside computation, on real processes: in order, whatever dies while they are under way."""

from __future__ import annotations

import sys
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.errors import UsageError
from bml.train.batches import BatchPlan

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

SHAPES = [(40, 5), (40,), (1,)]
PARTS = sum(int(np.prod(shape)) for shape in SHAPES)


def test_steps_that_are_begun_end_in_order_with_the_right_values() -> None:
    def train(session: bml.Session) -> None:
        me = session.server
        for step in session.steps(6):
            bucket = session.bucket(SHAPES, "int64")
            assert all(part.base is not None and np.shares_memory(part, bucket.vector) for part in bucket)
            bucket.vector[:] = np.arange(PARTS) + me + step
            handles = [session.allreduce_async(bucket), session.allreduce_async(np.array([me]), op="max")]
            handles.append(session.allreduce_async([np.full(3, me), np.full((2, 2), step)], shared=True))
            assert list(session.allreduce(np.array([step]))) == [4 * step], "blocking calls come after them"
            assert all(handle.done for handle in handles)
            parts = handles[0].wait()
            assert [part.shape for part in parts] == SHAPES
            flat = np.concatenate([part.reshape(-1) for part in parts])
            np.testing.assert_array_equal(flat, 4 * (np.arange(PARTS) + step) + 6)
            assert list(handles[1].wait()) == [3]
            three, four = handles[2].wait()
            assert list(three) == [6, 6, 6]
            assert not three.flags.writeable
            assert (four == 4 * step).all()

    jobs.launch(train, "bcube:2x2")


def test_steps_that_nobody_waits_for_are_ended_with_the_function() -> None:
    def train(session: bml.Session) -> int:
        for number in range(5):
            session.allreduce_async(np.full(1000, number))
        return session.server

    assert jobs.launch(train, "bcube:2x1").report["steps"] == 5


def test_a_loop_does_not_go_on_without_its_steps() -> None:
    def train(session: bml.Session) -> None:
        for _ in session.steps(2):
            session.allreduce_async(np.ones(3))

    with pytest.raises(UsageError, match=r"1 steps were begun and not waited for: call wait"):
        jobs.launch(train, "bcube:2x1")


def in_parts(session: bml.Session, epochs: int = 8, n_servers: int = 0) -> dict[str, Any]:
    """`jobs.descend` with the gradient in four parts, each begun as soon as it is there (see `jobs.pace`)."""
    w = session.empty(jobs.LENGTH)
    w[:] = 0
    session.state(params=w)
    where = np.array_split(np.arange(jobs.LENGTH), 4)
    recomputed = 0
    for batch in session.batches(jobs.N_SAMPLES, global_batch=jobs.GLOBAL_BATCH, epochs=epochs, seed=3):
        jobs.pace(session, n_servers)

        def part(indices: Any, columns: Any) -> Any:
            return np.ascontiguousarray(jobs.sample_rows(indices, w)[columns])

        def again(indices: Any, columns: Any) -> Any:
            nonlocal recomputed
            recomputed += 1
            return part(indices, columns)

        handles = [
            batch.allreduce_async(part(batch.indices, c), recompute=lambda indices, c=c: again(indices, c))
            for c in where
        ]
        for columns, handle in zip(where, handles, strict=True):
            w[columns] -= np.float32(0.1) * handle.wait()
    return {"params": w, "recomputed": recomputed}


@pytest.mark.parametrize(
    "faults",
    [
        ["kill:4@step=21", "kill:0@step=50,phase=broadcast"],
        ["blackhole:2/1@step=30,phase=reduce", "coordinator@step=60", "kill:8@step=90,phase=complete"],
    ],
    ids=["kills", "others"],
)
def test_faults_while_parts_of_a_batch_are_under_way(faults: list[str]) -> None:
    """Step 21 is the first part of the sixth batch: the other three are begun, and lack it, too."""
    seen = jobs.Seen()
    result = jobs.launch(in_parts, faults=faults, on_change=seen)
    report = result.report
    assert len(seen.terms) == 1 + sum(fault.startswith("coordinator") for fault in faults)
    broken = {"server:4", "server:0"} if "kill:4@step=21" in faults else {"link:2/1", "server:8"}
    assert seen.failures == broken
    assert report["steps"] == 4 * len(BatchPlan(jobs.N_SAMPLES, jobs.GLOBAL_BATCH, 8, 3))
    assert len(set(report["digests"].values())) == 1
    assert report["samples"]["complete"], "every sample exactly once per epoch"
    assert any(value["recomputed"] for value in result.values.values())
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-3, atol=1e-5)


def test_the_loop_need_not_wait_long_for_the_interpreters_lock() -> None:
    """What it would cost is measured by benchmarks/overlap.py."""

    def train(session: bml.Session) -> float:
        return sys.getswitchinterval()

    assert all(value == pytest.approx(1e-4) for value in jobs.launch(train, "bcube:2x1").values.values())


def test_a_joiner_comes_in_between_the_parts_of_a_batch() -> None:
    """It is let in at any step, so mostly in the middle of a batch of four."""

    def train(session: bml.Session) -> dict[str, Any]:
        return in_parts(session, epochs=24, n_servers=9)

    result = jobs.launch(train, faults=["kill:4@step=22", "join:4@step=60"])
    assert sorted(result.values) == list(range(9)), result.dead
    assert len(set(result.report["digests"].values())) == 1
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(24), rtol=1e-3, atol=1e-5)


def test_over_shared_memory() -> None:
    result = jobs.launch(in_parts, "bcube:2x2", transport="shm", faults=["kill:1@step=22"])
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(), rtol=1e-3, atol=1e-5)
