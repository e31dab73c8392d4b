"""Steps with priorities that are under way across iterations, on real processes, whatever dies or joins."""

from __future__ import annotations

import time
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.sharedmem import segment

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

N_BATCHES, GLOBAL_BATCH = 40, 24
SIZES = (5, 3 << 20, 1000)
"""The second layer is 12 MiB long, and so is sent in pieces."""


def train(session: bml.Session, n_batches: int = N_BATCHES, least_s: float = 0.0) -> dict[str, Any]:
    """Whole numbers only: the sums are exact in any order, and depend on the parameters before."""
    w = [np.zeros(size, np.float32) for size in SIZES]
    session.state(params=w)
    late: list[Any] = [None] * len(w)
    views = set()
    for batch in session.batches(n_batches * GLOBAL_BATCH, global_batch=GLOBAL_BATCH, epochs=1, seed=0):
        if 3 not in session.contributors and not session.replays:
            time.sleep(least_s)
        seen = 0.0
        for layer, handle in enumerate(late):
            if handle is not None:
                handle.wait()
            seen += float(w[layer][0]) + float(w[layer][-1])
        for layer in (2, 1, 0):

            def again(i: Any, layer: int = layer, seen: float = seen) -> Any:
                return np.full(SIZES[layer], len(i) * ((seen + layer) % 5), np.float32)

            def then(mean: Any, layer: int = layer) -> None:
                w[layer] += mean

            late[layer] = batch.allreduce_async(
                again(batch.indices), recompute=again, priority=layer, then=then
            )
        views.add(session.view.epoch)
    return {"last": [float(each[-1]) for each in w], "first": [float(each[0]) for each in w]}


def expected(n_batches: int = N_BATCHES) -> list[float]:
    w = [0.0] * len(SIZES)
    for _ in range(n_batches):
        seen = 2 * sum(w)
        w = [each + (seen + layer) % 5 for layer, each in enumerate(w)]
    return w


def check(result: bml.Result, least: int) -> None:
    assert result.report["samples"]["complete"]
    assert len(set(result.report["digests"].values())) == 1
    assert len(result.values) >= least
    for value in result.values.values():
        assert value == {"last": expected(), "first": expected()}


@pytest.mark.parametrize("transport", ["tcp", *(() if segment.why_not() else ("shm",))])
@pytest.mark.parametrize(
    "faults",
    [
        ["kill:1@step=57,phase=broadcast", "coordinator@step=80", "kill:0@step=95,phase=complete"],
    ],
)
def test_kills_between_pieces_change_no_number(transport: str, faults: list[str]) -> None:
    if transport == "shm":
        faults = [fault.replace(",phase=broadcast", "") for fault in faults]
    n_kills = sum(fault.startswith("kill") for fault in faults)
    check(jobs.launch(train, "bcube:2x2", transport=transport, faults=faults, min_servers=2), 4 - n_kills)


def slow(session: bml.Session) -> dict[str, Any]:
    """So slow until the fourth server is there that it finds the job running, however busy the machine is."""
    return train(session, least_s=0.3)


@pytest.mark.parametrize("transport", ["tcp", *(() if segment.why_not() else ("shm",))])
def test_a_server_that_joins_and_one_that_leaves_are_served_at_a_drained_boundary(transport: str) -> None:
    result = jobs.launch(
        slow, "bcube:2x2", transport=transport, absent=[3], faults=["join:3@step=5", "leave:1@step=80"]
    )
    check(result, 3)
    assert 3 in result.values, "it has joined"
