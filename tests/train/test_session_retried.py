"""A session whose steps are tried again: what is computed again, how often, and the mean over what."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from bml.faults.busy import Slowdown
from bml.protocol.wire.messages import View
from bml.topology.errors import UsageError
from bml.train.batches import BatchPlan, assignment
from bml.train.communicator import Committed, Outcome, Retried
from bml.train.session import Session

N_SAMPLES, GLOBAL_BATCH, EPOCHS = 36, 12, 2
LOST_IN = 3
"""The step in which server 2 dies."""


class Line:
    """A communicator of server 0 of three. Server 2 dies in step LOST_IN; server 1 does what is right."""

    server = 0
    servers = (0, 1, 2)
    joins = False

    def __init__(self) -> None:
        self.view = View(1, (0, 1, 2), (), 0, "start", 0.0)
        self.slowdown = Slowdown(lambda: 0.0, lambda seconds: None)
        self.step = 1
        self.brought: list[tuple[int, int]] = []

    def clock(self) -> float:
        return 0.0

    def joined(self) -> None:
        return None

    def begin_iteration(self) -> None:
        pass

    def boundary(self, state: Any) -> None:
        pass

    def empty(self, shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def sync(
        self, epoch: int, contribution: Any, op: str, text: str, signature: int, shared: bool = False
    ) -> Outcome:
        assert epoch == self.view.epoch, "prepared for another view"
        self.brought.append((self.step, epoch))
        if self.step == LOST_IN and epoch == 1:
            self.view = View(2, (0, 1), ("server:2",), LOST_IN - 1, "test", 0.0)
            return Retried(self.step, 2)
        step, self.step = self.step, self.step + 1
        base = self.servers if step <= LOST_IN else self.view.contributors
        batch = BatchPlan(N_SAMPLES, GLOBAL_BATCH, EPOCHS, 0).batch(step - 1)
        others = assignment(batch.indices, base, self.view.contributors)
        theirs = [value(np.concatenate(part)) for who, part in others.items() if who != 0]
        return Committed(step, epoch, self.view.contributors, sum(theirs, start=contribution.copy()))


def value(indices: Any) -> Any:
    """What these samples contribute: two numbers, exact in any order."""
    return np.array([indices.sum(), len(indices)], np.float64)


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(Line())
    yield made
    made.close()


def test_recompute_is_asked_once_for_what_a_lost_server_had_and_never_else(session: Session) -> None:
    asked: list[tuple[int, list[int]]] = []
    plan = BatchPlan(N_SAMPLES, GLOBAL_BATCH, EPOCHS, 0)
    for number, batch in enumerate(session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS), 1):

        def again(indices: Any, number: int = number) -> Any:
            asked.append((number, sorted(indices)))
            return value(indices)

        mean = batch.allreduce(value(batch.indices), recompute=again)
        whole = plan.batch(number - 1).indices
        np.testing.assert_array_equal(mean, value(whole) / len(whole))
    share = assignment(plan.batch(LOST_IN - 1).indices, (0, 1, 2), (0, 1))[0]
    assert len(share.extra) == 2
    assert asked == [(LOST_IN, sorted(share.extra))]
    samples = session.samples()
    assert samples is not None
    assert samples["complete"]


def test_without_recompute_the_mean_is_taken_over_the_rest(session: Session) -> None:
    plan = BatchPlan(N_SAMPLES, GLOBAL_BATCH, EPOCHS, 0)
    for number, batch in enumerate(session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS), 1):
        mean = batch.allreduce(value(batch.indices))
        if number == LOST_IN:
            break
    # Server 1 of the test brings its own share and its part of the lost one; only counts are compared.
    used = assignment(plan.batch(LOST_IN - 1).indices, (0, 1, 2), (0, 1))
    total = value(used[0].own) + value(np.concatenate(used[1]))
    n_used = len(used[0].own) + len(used[1].own)
    np.testing.assert_allclose(mean, total / n_used)


def test_a_step_is_brought_anew_only_when_its_view_is_over(session: Session) -> None:
    line = session._communicator
    for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS):
        batch.allreduce(value(batch.indices), recompute=value)
    assert isinstance(line, Line)
    assert line.brought == [(1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2), (6, 2)]


def test_parameters_that_are_bound_anew_are_warned_of_at_the_loop(session: Session) -> None:
    line = session._communicator
    assert isinstance(line, Line)
    steps = count(1)

    def sync(epoch: int, contribution: Any, *_: Any, **__: Any) -> Outcome:
        return Committed(next(steps), epoch, (0,), contribution.copy())

    line.sync = sync  # type: ignore[method-assign]

    def train() -> None:
        w = np.zeros(2)
        session.state(params=w)
        for _ in session.steps(12):
            w = w - session.allreduce(np.ones(2))

    with pytest.warns(UserWarning, match="have not changed in 10 steps") as caught:
        train()
    of_the_loop = train.__code__.co_firstlineno + 3
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, of_the_loop)]


def test_recompute_must_return_what_the_gradient_is(session: Session) -> None:
    def train() -> None:
        for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS):
            batch.allreduce(value(batch.indices), recompute=lambda indices: value(indices).astype("f4"))

    with pytest.raises(UsageError, match="recompute returned float32"):
        train()


def test_a_batch_that_was_not_ended_is_named(session: Session) -> None:
    with pytest.raises(UsageError, match="batch 0 of epoch 0 was not ended"):
        for _ in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS):
            pass


def test_a_shared_result_cannot_be_written(session: Session) -> None:
    line = session._communicator
    assert isinstance(line, Line)
    line.sync = lambda *given: Committed(1, 1, (0, 1, 2), np.ones(3))  # type: ignore[method-assign]
    assert session.allreduce(np.ones(3)).flags.writeable
    assert not session.allreduce(np.ones(3), shared=True).flags.writeable
    assert not any(part.flags.writeable for part in session.allreduce([np.ones(1), np.ones(2)], shared=True))


def test_a_bucket_takes_the_shapes_that_empty_takes(session: Session) -> None:
    assert [part.shape for part in session.bucket([3, (2, 2), ()])] == [(3,), (2, 2), ()]
    for shapes in ([(-1,), (4,)], [2.5], ["ab"]):
        with pytest.raises(UsageError, match="is not a shape"):
            session.bucket(shapes)  # type: ignore[arg-type]


@pytest.mark.parametrize("closes", [False, True])
def test_a_loop_that_was_left_is_open_while_its_iterator_is_kept(session: Session, closes: bool) -> None:
    kept = session.steps(5)
    for _ in kept:
        break
    if closes:
        kept.close()  # type: ignore[attr-defined]
    for _ in session.steps(2):
        assert len(session._position.path) == (1 if closes else 2)
    assert list(kept) == ([] if closes else [1, 2, 3, 4])
