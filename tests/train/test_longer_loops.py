"""Jobs that go on from a checkpoint with loops of other lengths than those of the job that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from files_in_memory import Memory

from bml.errors import UsageError
from bml.sim.programs.faults import Dead, Faults
from bml.sim.programs.running import run
from bml.train.keeping.resuming import Resumed, newest_whole, read
from bml.train.keeping.writer import Writer

N = 3
"""Batches of an epoch."""


@pytest.fixture(autouse=True)
def _written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are written before the training goes on: which checkpoint is the newest depends on no core."""
    monkeypatch.setattr(Writer, "_begin", lambda self, work: work())


def train(*epochs: int, n_steps: int = 1, seed: int = 0) -> Callable[[Any], Any]:
    """One loop over batches after the other, in each iteration of an outer loop."""

    def function(session: Any) -> Any:
        w = np.zeros(4)
        session.state(params=w)

        def gradient(indices: Any) -> Any:
            return 0.1 * w + np.sin(indices).sum()

        for _ in session.steps(n_steps):
            for each in epochs:
                for batch in session.batches(4 * N, global_batch=4, epochs=each, seed=seed):
                    w -= batch.allreduce(gradient(batch.indices), recompute=gradient)
        return w.copy(), session.samples()

    return function


def ends_of(
    function: Callable[[Any], Any], memory: Memory, job: str, dies_after: int | None = None, every: int = 1
) -> dict[int, Any]:
    """What each server returned or raised; it goes on from the newest whole checkpoint, if there is one."""
    found: dict[int, Any] = {}
    key = newest_whole(memory) if memory.files else None

    def note(communicator: Any, session: Any, value: Any, error: BaseException | None) -> None:
        if not isinstance(error, Dead):
            found[communicator.server] = value if error is None else error

    def begin(session: Any) -> None:
        if key is not None:
            session.resume(Resumed(key, read(memory, key)))
        session.checkpoint(memory, every=every, keep=1)

    group = run(function, range(2), Faults(ends_after=dies_after), note, begin, job)
    assert not group.violations
    return found


@pytest.mark.parametrize("dies_after", [9, 25, None])
@pytest.mark.parametrize("longer", [{"n_steps": 4}, {"epochs": 4}])
def test_a_longer_training_is_as_if_it_had_been_so_from_the_beginning(
    dies_after: int | None, longer: dict[str, int]
) -> None:
    """It dies in the loop, or after it has ended: its last checkpoint is that at the end of the loop."""
    memory = Memory({})
    ends_of(train(2, n_steps=2 if "n_steps" in longer else 1), memory, "first", dies_after)
    whole = train(longer.get("epochs", 2), n_steps=longer.get("n_steps", 1))
    again, undisturbed = ends_of(whole, memory, "second"), ends_of(whole, Memory({}), "third")
    for server, (value, samples) in again.items():
        assert (value == undisturbed[server][0]).all()
        assert samples["complete"]
        assert samples["steps"] == undisturbed[server][1]["steps"]


def test_a_training_may_end_where_the_checkpoint_is_but_not_before() -> None:
    memory = Memory({})
    ends_of(train(6), memory, "first")
    files = dict(memory.files)
    with pytest.raises(
        UsageError, match=r"in iteration \d+ of batches.*epochs=6.*epochs=1.* ends before: give"
    ):
        raise ends_of(train(1), memory, "second")[0]
    fewer = ends_of(train(6), Memory(files), "third")
    assert fewer[0][1]["complete"]


def test_steps_that_were_over_cannot_be_more() -> None:
    def twice(n: int) -> Callable[[Any], Any]:
        def function(session: Any) -> Any:
            w = np.zeros(4)
            session.state(params=w)
            for length in (n, 5):
                for _ in session.steps(length):
                    w += session.allreduce(np.ones(4), "avg")
            return w.copy()

        return function

    memory = Memory({})
    ends_of(twice(4), memory, "first", 30)
    files = dict(memory.files)
    ends = ends_of(twice(6), memory, "second")
    with pytest.raises(UsageError, match=r"the loop steps\(4\) was over, and is steps\(6\) here"):
        raise ends[0]
    assert (ends_of(twice(4), Memory(files), "third")[0] == 9).all()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            train(3, 2),
            r"the loop batches\(.*epochs=2.*was over, and is batches\(.*epochs=3.*another loop at the",
        ),
        (train(2, 3, seed=1), r"the loop batches.*seed=0.*the checkpoint is in batches|comes to the loop"),
    ],
)
def test_a_loop_that_was_over_cannot_be_made_longer(other: Any, says: str) -> None:
    memory = Memory({})
    ends_of(train(2, 2), memory, "first")
    ends = ends_of(other, memory, "second")
    assert all(isinstance(end, UsageError) for end in ends.values())
    with pytest.raises(UsageError, match=says):
        raise ends[0]


@pytest.mark.parametrize("dies_after", range(10, 26))
def test_the_newest_whole_checkpoint_is_never_older_than_two_intervals(dies_after: int) -> None:
    every, memory = 4, Memory({})
    ends_of(train(10), memory, "first", dies_after, every)
    assert dies_after - 2 * every <= newest_whole(memory).steps <= dies_after
