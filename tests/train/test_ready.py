"""Steps that begin before their arrays are filled: nothing reads an array before its `ready` has returned."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from model_jobs import job, results

from bml.errors import TrainingError
from bml.sim.programs.faults import Faults
from bml.topology.errors import UsageError
from bml.train.bfloat16 import BFLOAT16

pytestmark = pytest.mark.timeout(60)

N_SAMPLES, GLOBAL_BATCH, EPOCHS = 48, 24, 3
N = 3


class Late:
    """Values that another thread writes into an array, no sooner than they are waited for."""

    def __init__(self, array: Any, values: Any):
        self.n_calls = 0
        self.threads = set[str]()
        self._is_wanted, self._is_there = threading.Event(), threading.Event()
        array.fill(np.nan if array.dtype.kind == "f" else 77)

        def write() -> None:
            if not self._is_wanted.wait(20):
                return  # of a server that was killed before
            array[...] = values
            self._is_there.set()

        threading.Thread(target=write, daemon=True).start()

    def __call__(self) -> None:
        self.n_calls += 1
        self.threads.add(threading.current_thread().name)
        self._is_wanted.set()
        assert self._is_there.wait(20)


@pytest.fixture(params=["", "1"], ids=["", "with check sums"], autouse=True)
def _debug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_DEBUG", request.param)


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_an_allreduce_reads_what_was_written_after_it_began(op: str, dtype: str) -> None:
    def train(session: Any) -> Any:
        given, bucket = session.empty(2, dtype), session.bucket([2, 1], dtype)
        late, later = Late(given, session.server + 1), Late(bucket.vector, 1)
        out = session.empty(2, np.float64 if (op, dtype) == ("avg", "int64") else dtype)
        handles = [
            session.allreduce_async(given, op, ready=late, out=out),
            session.allreduce_async(bucket, op, ready=later),
        ]
        for handle in handles:
            handle.wait()
        assert handles[0].wait() is out
        assert (late.n_calls, later.n_calls) == (1, 1)
        assert late.threads == {"bml-steps"}
        return out.tolist(), [part.tolist() for part in handles[1].wait()]

    ones = N if op == "sum" else 1
    wanted = {"sum": 6, "avg": 2, "max": 3}[op]
    for found in results(train, N).values():
        assert found == ([wanted] * 2, [[ones] * 2, [ones]])


def value(indices: Any) -> Any:
    """What these samples contribute: two numbers, exact in any order."""
    return np.array([indices.sum(), len(indices)], np.float64)


@pytest.mark.few(16)
@pytest.mark.parametrize("call", range(1, 10))
@pytest.mark.parametrize("moment", ["before", "brought", "committed"])
def test_a_death_at_any_call_changes_no_mean(call: int, moment: str) -> None:
    # `recompute` writes where a part lies of which nobody has waited for the values yet.
    def train(session: Any) -> Any:
        session.state()  # nothing stays from one step to the next
        parts = [session.empty(2, np.float64) for _ in range(3)]
        means = []

        def again(indices: Any) -> Any:
            for part in parts:
                part.fill(-1)
            return value(indices)

        for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS):
            lates = [Late(part, value(batch.indices)) for part in parts]
            handles = [
                batch.allreduce_async(part, again, ready=late)
                for part, late in zip(parts, lates, strict=True)
            ]
            means.append([handle.wait().tolist() for handle in handles])
            assert [late.n_calls for late in lates] == [1, 1, 1]
        assert session.samples()["complete"]
        return means

    ends = results(train, N, Faults(kills={1: (call, moment)}, joins=[(call + 4, 1)]))
    plain = results(lambda session: plain_means(session), 1)[0]
    assert set(ends) >= {0, 2}
    for server in (0, 2):
        assert ends[server] == [[mean] * 3 for mean in plain]


def plain_means(session: Any) -> Any:
    return [
        batch.allreduce(value(batch.indices)).tolist()
        for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS)
    ]


@pytest.mark.parametrize("of_batch", [False, True])
def test_an_error_of_ready_is_that_of_the_step_and_of_all_later_ones(of_batch: bool) -> None:
    def train(session: Any) -> None:
        def fail() -> None:
            raise ArithmeticError("the device is gone")

        for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=1):
            begin = batch.allreduce_async if of_batch else session.allreduce_async
            given = [np.ones(3) for _ in range(3)]
            first = begin(given[0])
            bad = begin(given[1], ready=fail if session.server == 1 else lambda: None)
            last = begin(given[2])
            if not of_batch:
                assert first.wait().tolist() == [N] * 3
            for handle in (bad, last):
                handle.wait()

    ends = job(train, N)
    assert isinstance(ends[1], ArithmeticError)
    for server in (0, 2):
        assert isinstance(ends[server], TrainingError)
        assert "the device is gone" in str(ends[server])


@pytest.mark.parametrize("of_batch", [False, True])
def test_what_would_be_copied_at_once_is_refused(of_batch: bool) -> None:
    def train(session: Any) -> int:
        refused = [
            [np.ones(2)],
            [1.0, 2.0],
            np.ones(2, np.int8),
            np.zeros(2, np.uint16).view(BFLOAT16),
            np.ones((4, 4))[:, ::2],
            session.bucket([2], "int32"),
        ]
        accepted = [np.empty(0), np.ones((2, 2), np.float32)]
        for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=1):
            begin = batch.allreduce_async if of_batch else session.allreduce_async
            for each in refused:
                with pytest.raises(UsageError, match="is copied at once"):
                    begin(each, ready=lambda: pytest.fail("it is called"))
            for handle in [begin(each, ready=lambda: None) for each in accepted]:
                handle.wait()
            if not of_batch:
                batch.allreduce(value(batch.indices))
        return len(refused)

    assert set(results(train, 2).values()) == {6}


def test_a_change_after_ready_is_found_with_check_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_DEBUG", "1")

    def train(session: Any) -> None:
        given, is_over = np.zeros(3), threading.Event()
        handle = session.allreduce_async(given, ready=lambda: given.fill(1))
        session.allreduce_async(np.ones(1), ready=is_over.set)  # steps go one after the other
        assert is_over.wait(20)
        given[:] = 2
        handle.wait()

    for end in job(train, 2).values():
        assert "an array was changed before its step was committed" in str(end)
