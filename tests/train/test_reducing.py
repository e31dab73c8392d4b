"""Reductions: means, bool, bfloat16, and arrays that take the result, with deaths in the middle."""

from __future__ import annotations

import time
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from model_jobs import job, results
from msgspec.structs import replace

from bml.sim.programs.communicator import ModelCommunicator
from bml.sim.programs.faults import Faults
from bml.topology.errors import UsageError
from bml.train.bfloat16 import BFLOAT16, from_float32, to_float32
from bml.train.communicator import Committed

pytestmark = pytest.mark.timeout(60)

N = 4


def bfloat16(*numbers: float) -> Any:
    return from_float32(np.array(numbers, np.float32)).view(BFLOAT16)


def numbers_in(array: Any) -> Any:
    return to_float32(array.view(np.uint16))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "uint16", "int64"])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_mean_is_over_the_servers_that_contributed(dtype: str, waits: bool, shared: bool) -> None:
    def train(session: Any) -> Any:
        found = []
        for step in range(3):
            mine = [np.full(2, 10 * session.server + step, dtype), np.array(7, dtype)]
            if waits:
                given = session.allreduce_async(mine, "avg", shared=shared).wait()
            else:
                given = session.allreduce(mine, "avg", shared=shared)
            found.append((given, session.contributors))
        return found

    for found in results(train, N, Faults(kills={3: (2, "before")})).values():
        assert [contributors for _, contributors in found] == [(0, 1, 2, 3), (0, 1, 2), (0, 1, 2)]
        for step, ((many, one), contributors) in enumerate(found):
            expected = Fraction(sum(10 * each + step for each in contributors), len(contributors))
            assert many.dtype == one.dtype == (dtype if np.dtype(dtype).kind in "fc" else np.float64)
            assert many.tolist() == [float(expected)] * 2
            assert one == 7
            assert many.flags.writeable is not shared


def test_a_mean_of_narrow_integers_does_not_wrap_round() -> None:
    assert all(
        mean.tolist() == [127.0] for mean in results(lambda s: s.allreduce(np.int8([127]), "avg")).values()
    )


@pytest.mark.parametrize(
    ("op", "combine"),
    [("sum", np.logical_or), ("max", np.logical_or), ("prod", np.logical_and), ("min", np.logical_and)],
)
@pytest.mark.parametrize("form", [np.asarray, lambda array: [array, array[:2]], lambda array: array[::2]])
def test_bool_is_or_and_and(op: str, combine: Any, form: Any) -> None:
    bits = np.array([[server >> bit & 1 for server in range(16)] for bit in range(N)], bool)
    found = results(lambda s: s.allreduce(form(bits[s.server]), op))
    expected = form(combine.reduce(bits))
    for each in found.values():
        assert type(each) is type(expected)
        pairs = zip(each, expected, strict=True) if isinstance(each, list) else [(each, expected)]
        for one, other in pairs:
            assert one.dtype == bool
            np.testing.assert_array_equal(one, other)


def test_bool_and_operations_that_it_has_not() -> None:
    for end in job(lambda s: s.allreduce(np.ones(2, bool), "avg")).values():
        assert isinstance(end, UsageError)
        assert "bool has no mean" in str(end)

    def gradient(session: Any) -> None:
        for batch in session.batches(8, global_batch=8, epochs=1):
            batch.allreduce(np.ones(2, bool))

    assert all("a gradient of dtype bool has no mean" in str(end) for end in job(gradient).values())


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "prod"])
@pytest.mark.parametrize("listed", [False, True])
def test_bfloat16_is_reduced_in_float32_and_rounded_once(op: str, listed: bool) -> None:
    chance = np.random.default_rng(5)
    given = from_float32((chance.standard_normal((N, 5, 3)) * 100).astype(np.float32))
    wide = to_float32(given).astype(np.float64)  # every step of the float32 reference is exact here

    def train(session: Any) -> Any:
        mine = given[session.server].view(BFLOAT16)
        return session.allreduce([mine, mine.T] if listed else mine, op)

    combine = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    total = wide[0].astype(np.float32)
    for each in wide[1:]:
        total = combine(total, each.astype(np.float32))
    expected = from_float32(total / np.float32(N) if op == "avg" else total)
    for found in results(train).values():
        one = found[0] if listed else found
        assert one.dtype == BFLOAT16
        np.testing.assert_array_equal(one.view(np.uint16), expected)
        if listed:
            np.testing.assert_array_equal(found[1].view(np.uint16), expected.T)


def test_one_rounding_keeps_what_roundings_between_would_lose() -> None:
    """256 + 1 is 256 in bfloat16: with a rounding after each addition nothing would ever be added."""
    found = results(lambda s: s.allreduce(bfloat16(256.0 if s.server == 0 else 1.0)))
    assert all(numbers_in(each).tolist() == [260.0] for each in found.values())  # 259, to the nearest


def test_arrays_of_ml_dtypes_come_back_as_such() -> None:
    narrow = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)

    def train(session: Any) -> Any:
        mine = np.array([256 if session.server == 0 else 1, -0.0]).astype(narrow)
        listed = session.allreduce([mine, mine[:1]], "avg")
        parts = session.scatter(
            [mine + narrow.type(each) for each in range(N)] if session.server == 2 else None, 2
        )
        mine_too = mine.copy()
        session.allreduce(mine_too, out=mine_too)
        bits = session.broadcast(mine.view(np.uint16), 0).view(narrow)
        return session.allreduce(mine), mine_too, listed[0], session.all_gather(mine)[3], parts, bits

    for me, found in results(train).items():
        assert all(each.dtype == narrow for each in found)
        total, in_place, mean, gathered, part, bits = (each.astype(np.float64).tolist() for each in found)
        assert total == in_place == [260.0, 0.0]
        assert mean == [65.0, 0.0]  # 259 / 4 lies in the middle of 64.5 and 65, which is even
        assert gathered == [1.0, 0.0]
        assert part == [1.0 + me, float(me)]
        assert bits == [256.0, 0.0]


def test_the_mean_gradient_of_a_batch_may_be_bfloat16() -> None:
    def train(session: Any) -> Any:
        found = []
        for batch in session.batches(12, global_batch=12, epochs=2, seed=1):

            def gradient(indices: Any) -> Any:
                return bfloat16(indices.sum(), len(indices))

            found.append(batch.allreduce(gradient(batch.indices), recompute=gradient))
        return [numbers_in(each).tolist() for each in found], session.samples()["complete"]

    ends = results(train, N, Faults(kills={2: (2, "before")}))
    assert sorted(ends) == [0, 1, 3]
    assert all(end == ([[5.5, 1.0]] * 2, True) for end in ends.values())


def test_sums_in_shared_memory_are_free_before_their_parts_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many parts may be on their way: each sum that is kept would take memory that the next one could use."""
    sums: list[weakref.ref[Any]] = []
    sync = ModelCommunicator.sync

    def read_in_place(self: ModelCommunicator, *call: Any) -> Any:
        outcome = sync(self, *call)
        if isinstance(outcome, Committed):
            shared = np.array(outcome.result)
            shared.flags.writeable = False
            sums.append(weakref.ref(shared))
            outcome = replace(outcome, result=shared)
        return outcome

    monkeypatch.setattr(ModelCommunicator, "sync", read_in_place)

    def train(session: Any) -> Any:
        for batch in session.batches(8, global_batch=8, epochs=1):
            parts = [batch.allreduce_async(np.full(3, float(number))) for number in range(3)]
            while not parts[-1].done:
                time.sleep(0.001)
            n_kept = sum(each() is not None for each in sums)
            means = [float(each.wait()[0]) for each in parts]
        return n_kept, means

    assert results(train, 1) == {0: (0, [0.0, 1 / 8, 2 / 8])}
    assert len(sums) == 3


FORMS = [
    ("float32", "sum", "float32", 1 + 2 + 4),
    ("int8", "sum", "int8", (100 + 101 + 103) - 256),
    ("int8", "sum", "int64", 304),
    ("int32", "avg", "float32", np.float32(7 / 3)),
    ("float64", "max", "float32", 4),
    ("int16", "min", "float64", 1),
]
"""The dtype given, the operation, the dtype of out, and the number expected of servers 0, 1 and 3."""


@pytest.mark.parametrize(("dtype", "op", "into", "expected"), FORMS)
@pytest.mark.parametrize("waits", [False, True])
def test_out_takes_the_result(dtype: str, op: str, into: str, expected: Any, waits: bool) -> None:
    def train(session: Any) -> Any:
        x = np.full((2, 3), session.server + (100 if dtype == "int8" else 1), dtype)
        session.barrier()
        out = x if into == dtype else np.zeros((2, 3), into)
        if waits:
            handle = session.allreduce_async(x, op, out=out)
            found = handle.wait()
            assert handle.wait() is found
        else:
            found = session.allreduce(x, op, out=out)
        assert found is out
        assert out.tolist() == [[expected] * 3] * 2
        return True

    assert results(train, N, Faults(kills={2: (2, "before")})) == {0: True, 1: True, 3: True}


def test_out_takes_lists_buckets_bool_and_bfloat16() -> None:
    def train(session: Any) -> Any:
        bucket = session.bucket([2, (1, 2)], "float32")
        bucket.vector[:] = session.server
        assert session.allreduce(bucket, out=bucket) is bucket
        assert bucket.vector.tolist() == [6] * 4
        many = [np.full(2, session.server), np.full((1, 1), 1)]
        assert session.allreduce(many, "max", out=many) is many
        assert [each.tolist() for each in many] == [[3, 3], [[1]]]
        flag = np.array([session.server == 2, False])
        assert session.allreduce(flag, out=flag).tolist() == [True, False]
        narrow = bfloat16(0.5, session.server)
        assert session.allreduce(narrow, "avg", out=narrow) is narrow
        assert numbers_in(narrow).tolist() == [0.5, 1.5]
        strided = np.arange(6.0)[::2]
        session.allreduce(strided, out=strided)
        return strided.tolist()

    assert set(map(tuple, results(train).values())) == {(0, 8, 16)}


def test_numbers_that_do_not_fit_into_out_are_infinite_whatever_numpy_is_to_do() -> None:
    def train(session: Any) -> Any:
        with np.errstate(all="raise"):
            return session.allreduce(np.array([1e300]), out=np.zeros(1, np.float32)).tolist()

    assert list(results(train).values()) == [[np.inf]] * N


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros(3), r"out has shape \(3,\), the result \(2,\)"),
        (np.zeros(2, int), "out has dtype int64, which cannot take a result of dtype float64"),
        (np.zeros(2, BFLOAT16), "which cannot take a result of dtype float64"),
        ([np.zeros(2)], "out must be one array"),
        ([0.0, 0.0], "out must be one array"),
        (3.0, "out is float: give a numpy array"),
    ],
)
def test_an_out_that_cannot_take_the_result_is_named_before_the_step(out: Any, message: str) -> None:
    def train(session: Any) -> Any:
        with pytest.raises(UsageError, match=message):
            session.allreduce(np.ones(2), out=out)
        return session.allreduce(np.ones(1)).tolist()

    assert list(results(train).values()) == [[4.0]] * N
