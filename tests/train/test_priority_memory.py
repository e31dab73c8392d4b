"""What steps with priorities keep in memory: nothing that waits for Python's collector of cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Faults
from tests.train.model_jobs import results

pytestmark = pytest.mark.timeout(60)
N_STEPS = 100


class Counted(np.ndarray):
    """An array of `empty`; that it is freed can be noticed."""


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The numbers of the arrays of `empty` that are in use; no cycle is collected meanwhile."""
    found: set[int] = set()
    made = ModelCommunicator.empty
    number = iter(range(1 << 30))

    def empty(self: ModelCommunicator, shape: Any, dtype: Any) -> Any:
        array = made(self, shape, dtype).view(Counted)
        found.add(mine := next(number))
        weakref.finalize(array, found.discard, mine)
        return array

    monkeypatch.setattr(ModelCommunicator, "empty", empty)
    gc.disable()
    yield found
    gc.enable()


def in_steps(session: Any, alive: set[int]) -> list[int]:
    given, most = np.ones(64), []
    for step in session.steps(N_STEPS):
        session.allreduce_async(given, "avg" if step % 2 else "sum", priority=step % 3)
        most.append(len(alive))
    return most


def in_batches(session: Any, alive: set[int]) -> list[int]:
    most = []
    for batch in session.batches(4 * N_STEPS, global_batch=4, epochs=1):
        for part in range(2):
            batch.allreduce_async(np.ones(64), lambda indices: np.ones(64), priority=part)
        most.append(len(alive))
    return most


@pytest.mark.parametrize("program", [in_steps, in_batches])
def test_results_that_nobody_holds_are_freed_at_once(program: Any, alive: set[int]) -> None:
    (most,) = results(lambda session: program(session, alive), 1, Faults(piece_nbytes=128)).values()
    assert len(most) == N_STEPS
    assert max(most) <= 12, "the results of two iterations, and the memory of pieces"


def test_a_result_is_not_kept_by_the_thread_of_the_steps_while_it_waits(alive: set[int]) -> None:
    def train(session: Any) -> int:
        session.allreduce_async(np.ones(64), priority=0).wait()
        session.allreduce_async(np.ones(64)).wait()  # its thread has done all that was begun before
        return len(alive)

    (left,) = results(train, 1, Faults(piece_nbytes=128)).values()
    assert left <= 1, "the memory of pieces"
