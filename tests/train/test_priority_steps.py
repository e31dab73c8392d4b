"""Steps with priorities on the real session, over the model of the runtime: late waits, joiners, deaths."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bml.errors import BmlError, SessionBroken, StepMismatch, UsageError
from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Faults
from bml.sim.programs.running import run
from bml.train import snapshot
from bml.train.bfloat16 import BFLOAT16, from_float32
from bml.train.keeping import whole_state
from tests.train.model_jobs import job, results

pytestmark = pytest.mark.timeout(60)


def training(n_batches: int, layers: int = 3) -> Callable[[Any], Any]:
    """Each layer is updated when its mean is there, in the next iteration; the last one whenever it comes."""

    def train(session: Any) -> Any:
        w = [np.zeros(5) for _ in range(layers)]
        count = np.zeros((), np.int64)
        session.state(params=w, count=count)
        late: list[Any] = []
        whole: list[Any] = []
        for batch in session.batches(12 * n_batches, global_batch=12, epochs=1, seed=0):
            for handle in late[:-1]:
                handle.wait()
            old, late = [each.copy() for each in w], []
            for layer in range(layers - 1, -1, -1):

                def again(i: Any, layer: int = layer, old: Any = old) -> Any:
                    seen = old[0][0] + old[1][0] if layer < layers - 1 else 0
                    return np.full(5, (seen % 7 + layer) * len(i))

                def then(mean: Any, layer: int = layer) -> None:
                    w[layer] += mean

                late.insert(
                    0,
                    batch.allreduce_async(again(batch.indices), recompute=again, priority=layer, then=then),
                )
            whole.append(batch)
            count += 1
        assert all(each.committed for each in whole)
        return [each.copy() for each in w], int(count), session.samples()["loops"][0]["end"]

    return train


def same(one: Any, other: Any) -> None:
    assert np.array_equal(one[0], other[0])
    assert one[1:] == other[1:]


def test_waits_in_the_next_iteration_give_what_one_server_computes() -> None:
    (alone,) = results(training(8), 1).values()
    for end in results(training(8), 4, Faults(piece_nbytes=8)).values():
        same(end, alone)


def test_a_death_between_pieces_changes_no_number() -> None:
    (alone,) = results(training(8), 1).values()
    for call, when in ((9, "before"), (33, "brought"), (50, "committed")):
        ends = results(training(8), 4, Faults(kills={2: (call, when)}, piece_nbytes=8))
        assert sorted(ends) == [0, 1, 3]
        for end in ends.values():
            same(end, alone)


def test_a_joiner_is_given_the_state_when_all_steps_were_waited_for() -> None:
    (alone,) = results(training(20), 1).values()
    faults = Faults(absent=(3,), kills={1: (30, "brought")}, piece_nbytes=16, holds_for_joiners=True)
    faults.joins += [(40, 1), (50, 3)]
    ends = results(training(20), 4, faults)
    assert sorted(ends) == [0, 1, 2, 3]
    for end in ends.values():
        same(end, alone)


def ledgers(joins_after: int, dies_in: int) -> set[str]:
    """The digests of the servers' ledgers in a job in which one server joins and another one dies."""
    found: set[str] = set()

    def note(communicator: Any, session: Any, value: Any, error: BaseException | None) -> None:
        if error is None:
            found.add(session.samples()["digest"])

    faults = Faults(
        absent=(3,), kills={1: (dies_in, "brought")}, joins=[(joins_after, 3)], holds_for_joiners=True
    )
    assert not run(training(12), range(4), faults, note).violations
    return found


DEATHS_NEAR_JOINS = [(joins, joins + later) for joins in (9, 13, 17) for later in range(4, 10)]


@pytest.mark.slow
def test_a_joiner_knows_at_each_boundary_what_the_others_know() -> None:
    """Else it drains at another boundary than they, and splits the next batch among other servers."""
    for joins_after, dies_in in DEATHS_NEAR_JOINS:
        assert len(ledgers(joins_after, dies_in)) == 1


def test_a_joiner_that_is_not_told_whether_it_must_drain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = snapshot.snapshot
    monkeypatch.setattr(whole_state, "snapshot", lambda *given: made(*given[:5], False, *given[6:]))
    assert any(len(ledgers(*each)) > 1 for each in DEATHS_NEAR_JOINS)


def test_a_server_that_leaves_finishes_what_it_has_begun() -> None:
    (alone,) = results(training(12), 1).values()
    ends = job(training(12), 3, Faults(leaves={1: 2}, piece_nbytes=8))
    assert isinstance(ends.pop(1), BmlError)
    for end in ends.values():
        same(end, alone)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "i1", "u8", "?", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "prod"])
def test_pieces_give_what_a_whole_step_gives(dtype: str, op: str) -> None:
    def train(session: Any) -> Any:
        given = (np.arange(10) + session.server) % 3
        bits = from_float32(given.astype("f4")).view(BFLOAT16)
        made = bits if dtype == "bfloat16" else given.astype(dtype)
        if dtype == "?" and op == "avg":
            with pytest.raises(UsageError, match="no mean"):
                session.allreduce_async(made, op, priority=1)
            return None
        seen: list[Any] = []
        handle = session.allreduce_async(made, op, priority=1, then=seen.append)
        out = made.copy() if dtype != "i1" else None
        found = handle.wait()
        assert handle.wait() is found
        assert len(seen) == 1, "it is called once"
        assert seen[0] is found
        if out is not None and dtype != "u8":
            assert session.allreduce_async(out, op, priority=2, out=out).wait() is out
            assert np.array_equal(out, found)
        whole = session.allreduce(made, op)
        assert found.dtype == whole.dtype
        assert np.array_equal(found, whole)
        return None

    results(train, 3, Faults(piece_nbytes=8))


def test_integers_that_are_averaged_in_pieces_have_the_mean_of_the_batch() -> None:
    def train(session: Any) -> None:
        for batch in session.batches(24, global_batch=12, epochs=1):
            given = np.full(9, 3 * len(batch.indices), np.int16)
            mean = batch.allreduce_async(given, priority=0).wait()
            assert mean.dtype == np.float64
            assert np.array_equal(mean, np.full(9, 3.0))

    results(train, 3, Faults(piece_nbytes=16))


def test_a_loop_that_goes_on_waits_for_the_batch_before_the_last() -> None:
    def train(session: Any) -> None:
        seen: list[int] = []
        handles: list[Any] = []
        for step in session.steps(6):
            assert seen[: max(step - 1, 0)] == list(range(max(step - 1, 0)))
            handles.append(
                session.allreduce_async(
                    np.ones(3), priority=-step, then=lambda _, step=step: seen.append(step)
                )
            )
        assert sorted(seen) == list(range(6)), "and a loop that ends for all"
        assert all(handle.done for handle in handles)
        for handle in handles:
            assert handle.wait()[0] == session.n_servers

    results(train, 3)


def test_a_loop_that_is_left_waits_for_its_steps() -> None:
    def train(session: Any) -> Any:
        seen: list[Any] = []
        for batch in session.batches(30, global_batch=10, epochs=1):
            batch.allreduce_async(np.ones(2) * len(batch.indices), priority=1, then=seen.append)
            if batch.batch_no == 1:
                break
        assert len(seen) == 2
        assert batch.committed
        return session.samples()["loops"][0]["steps"]

    assert set(results(train, 2).values()) == {2}


def test_a_blocking_call_comes_after_all_that_was_begun() -> None:
    def train(session: Any) -> None:
        seen: list[Any] = []
        for _ in session.steps(3):
            for priority in (3, -3):
                session.allreduce_async(np.ones(20), priority=priority, then=seen.append)
            n_before = len(seen)
            session.barrier()
            assert len(seen) >= n_before
            assert len(seen) % 2 == 0

    results(train, 2, Faults(piece_nbytes=8))


def test_what_must_not_be_done_is_refused() -> None:
    def train(session: Any) -> None:
        with pytest.raises(UsageError, match="whole number"):
            session.allreduce_async(np.ones(1), priority=0.5)
        with pytest.raises(UsageError, match="then is for steps with a priority"):
            session.allreduce_async(np.ones(1), then=print)
        earlier = None
        for batch in session.batches(30, global_batch=10, epochs=1):
            batch.allreduce_async(np.ones(2), priority=1)
            if earlier is not None:
                with pytest.raises(UsageError, match=r"its loop has gone on|is committed"):
                    earlier.allreduce_async(np.ones(2), priority=1)
            earlier = batch

    results(train, 2)


def test_different_priorities_are_a_mismatch() -> None:
    def train(session: Any) -> None:
        session.allreduce_async(np.ones(1), priority=session.server).wait()

    ends = job(train, 2)
    assert any("priority" in str(end) for end in ends.values())


def test_then_may_make_no_call() -> None:
    def train(session: Any) -> None:
        session.allreduce_async(np.ones(1), priority=0, then=lambda _: session.barrier()).wait()

    assert any("then called the session" in str(end) for end in job(train, 2).values())


def test_ready_is_called_once_before_the_array_is_read() -> None:
    def train(session: Any) -> None:
        given, calls = session.empty(12, "f8"), []

        def ready() -> None:
            calls.append(1)
            given[:] = 2.0

        found = session.allreduce_async(given, priority=1, ready=ready).wait()
        assert len(calls) == 1
        assert np.array_equal(found, np.full(12, 2.0 * session.n_servers))

    results(train, 3, Faults(piece_nbytes=24))


def test_what_is_noted_of_steps_outside_of_loops_does_not_grow() -> None:
    def train(session: Any) -> int:
        for _ in range(50):
            session.allreduce_async(np.ones(3), priority=0).wait()
        return len(session._collectives._noted)

    assert set(results(train, 2).values()) == {1}


@pytest.mark.parametrize("moment", ["a loop ends", "the function ends"])
def test_a_server_that_was_lost_shows_in_contributors_after_a_loop(moment: str) -> None:
    def train(session: Any) -> Any:
        for _ in session.steps(6):
            session.allreduce_async(np.ones(3), priority=0)
        if moment == "the function ends":
            for _ in range(3):
                session.allreduce_async(np.ones(3), priority=0).wait()
            session.barrier()
        return session.contributors

    assert set(results(train, 3, Faults(kills={1: (4, "before")})).values()) == {(0, 2)}


def test_a_digest_is_of_what_was_begun_before() -> None:
    def train(session: Any) -> list[Any]:
        w, found = np.zeros(4), []
        session.state(params=w)

        def then(total: Any) -> None:
            w[:] += total

        for _ in session.steps(4):
            session.allreduce_async(np.ones(4), priority=0, then=then)
            found.append((session.digest(), w.copy()))
        return found

    for found in results(train, 2).values():
        assert [list(w) for _, w in found] == [[2.0 * step] * 4 for step in range(1, 5)]
        assert len({digest for digest, _ in found}) == 4


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_what_a_signal_raises_when_a_loop_is_left_is_not_swallowed(raised: type[BaseException]) -> None:
    def train(session: Any) -> str:
        def then(_: Any) -> None:
            raise raised("by a handler")

        loop = session.steps(3)
        next(loop)
        session.allreduce_async(np.ones(2), priority=0, then=then)
        with pytest.raises(raised, match="by a handler"):
            loop.close()
        with pytest.raises(SessionBroken):
            session.barrier()
        return "was heard"

    ends = job(train, 1)
    assert isinstance(ends[0], SessionBroken), "the session cannot go on"


def test_the_error_of_the_job_when_a_loop_is_left_comes_from_the_next_call() -> None:
    def train(session: Any) -> None:
        for _ in session.steps(3):
            session.allreduce_async(np.ones(1), priority=session.server)
            break
        with pytest.raises(StepMismatch):
            session.barrier()

    assert all(isinstance(end, BmlError) for end in job(train, 2).values())


def test_a_loop_that_another_thread_drops_is_left_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python collects cycles in any thread; that of the steps would wait for itself."""
    dropped, may_go = threading.Event(), threading.Event()
    held: list[Any] = []
    sync = ModelCommunicator.sync

    def dropping(self: ModelCommunicator, *given: Any) -> Any:
        if held:
            assert threading.current_thread().name == "bml-steps"
            may_go.wait()
            held.pop().close()
            dropped.set()
        return sync(self, *given)

    monkeypatch.setattr(ModelCommunicator, "sync", dropping)

    def train(session: Any) -> Any:
        loop, seen = session.batches(30, global_batch=10, epochs=1), []
        batch = next(loop)
        held.append(loop)
        del loop
        handle = batch.allreduce_async(np.ones(2) * len(batch.indices), priority=1, then=seen.append)
        may_go.set()
        handle.wait()
        assert dropped.is_set()
        for step in session.steps(2):
            assert session.allreduce(np.ones(1))[0] == 1, step
        return len(seen), session.samples()["loops"][0]["steps"]

    assert results(train, 1) == {0: (1, 1)}
