"""`session.allreduce` on real processes: shapes, dtypes, ops, odd lengths, and calls that do not agree."""

from __future__ import annotations

from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.errors import StepMismatch, UsageError
from bml.train.bfloat16 import BFLOAT16, from_float32, to_float32

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.mark.smoke
def test_values_of_many_kinds() -> None:
    def train(session: bml.Session) -> dict[str, Any]:
        me = session.server
        out: dict[str, Any] = {}
        for n in (0, 1, 2, 3, 7, 8, 100, 100_003):  # bcube:2x2 has 8 pieces
            out[f"n{n}"] = session.allreduce(np.arange(n, dtype=np.int64) + me)
        for dtype in ("float32", "float64", "int32", "complex64", "float16", "uint8"):
            out[dtype] = session.allreduce(np.full((3, 2), me + 1, dtype))
        for op in ("sum", "min", "max", "prod"):
            out[op] = session.allreduce(np.array([me + 1, 5 - me]), op=op)
        out["list"] = session.allreduce([np.full(3, me, np.float32), np.full((2, 2), 10 * me, np.float32)])
        out["scalar"] = session.allreduce(np.float64(me))
        out["strided"] = session.allreduce(np.arange(12.0).reshape(3, 4).T + me)
        out["nan"] = session.allreduce(np.array([np.nan if me == 2 else 1.0, np.inf, 1.0]))
        out["avg"] = session.allreduce(np.array([me, 3 * me], np.int32), op="avg")
        out["bool"] = session.allreduce(np.array([me == 1, False, True]), op="sum")
        narrow = from_float32(np.array([256 if me == 0 else 1, 0.5], np.float32)).view(BFLOAT16)
        out["bfloat16"] = to_float32(session.allreduce(narrow, out=narrow).view(np.uint16))
        session.barrier()
        return out

    result = jobs.launch(train, "bcube:2x2")
    for out in result.values.values():
        for n in (0, 1, 2, 3, 7, 8, 100, 100_003):
            np.testing.assert_array_equal(out[f"n{n}"], 4 * np.arange(n) + 6)
        for dtype in ("float32", "float64", "int32", "complex64", "float16", "uint8"):
            assert out[dtype].dtype == {"int32": "int64", "uint8": "uint64"}.get(dtype, dtype)
            np.testing.assert_array_equal(out[dtype], np.full((3, 2), 10))
        assert [list(out[op]) for op in ("sum", "min", "max", "prod")] == [
            [10, 14],
            [1, 2],
            [4, 5],
            [24, 120],
        ]
        assert [part.shape for part in out["list"]] == [(3,), (2, 2)]
        assert [part.flat[0] for part in out["list"]] == [6, 60]
        assert out["scalar"] == 6
        assert out["scalar"].shape == ()
        np.testing.assert_array_equal(out["strided"], 4 * np.arange(12.0).reshape(3, 4).T + 6)
        np.testing.assert_array_equal(out["nan"], [np.nan, np.inf, 4.0])
        assert out["avg"].tolist() == [1.5, 4.5]
        assert out["bool"].tolist() == [True, False, True]
        assert out["bfloat16"].tolist() == [260.0, 2.0]


def test_floats_have_the_same_bits_everywhere_and_in_every_run() -> None:
    def train(session: bml.Session) -> bytes:
        values = (
            np.random.Generator(np.random.PCG64(session.server)).standard_normal(10_007).astype(np.float32)
        )
        return bytes(session.allreduce(values).tobytes())

    first, second = jobs.launch(train), jobs.launch(train)
    assert len({*first.values.values(), *second.values.values()}) == 1


def test_a_large_vector_in_many_slices() -> None:
    def train(session: bml.Session) -> bool:
        x = np.arange(3_000_001, dtype=np.float32) % 1000
        total = session.allreduce(x + session.server)
        return bool(np.array_equal(total, 9 * x + 36)) and bool(
            np.array_equal(x, np.arange(3_000_001) % 1000)
        )

    assert all(jobs.launch(train).values.values())


@pytest.mark.parametrize(
    ("odd", "even", "message"),
    [
        pytest.param(
            lambda s: s.allreduce(np.ones(5)),
            lambda s: s.allreduce(np.ones(4)),
            # Either of two servers may be the first to notice, and names the other one first.
            r"(?=.*server 1 called allreduce sum float64 \(5,\))"
            r"(?=.*server [03] called allreduce sum float64 \(4,\))",
            marks=pytest.mark.smoke,
        ),
        (
            lambda s: s.allreduce(np.ones(5, "f4")),
            lambda s: s.allreduce(np.ones(5)),
            "float32.*float64|float64.*float32",
        ),
        (lambda s: s.allreduce(np.ones(5), "max"), lambda s: s.allreduce(np.ones(5)), "allreduce max"),
        (lambda s: s.barrier(), lambda s: s.allreduce(np.ones(5)), "uint8"),
    ],
    ids=["shape", "dtype", "op", "call"],
)
def test_calls_that_do_not_agree_are_named(odd: Any, even: Any, message: str) -> None:
    def train(session: bml.Session) -> None:
        session.allreduce(np.ones(2))
        (odd if session.server == 1 else even)(session)

    with pytest.raises(StepMismatch, match=message) as caught:
        jobs.launch(train, "bcube:2x2")
    assert "step 2: server" in str(caught.value)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_server_that_makes_a_call_less_is_named(transport: str) -> None:
    def train(session: bml.Session) -> None:
        for _ in range(3 - (session.server == 2)):
            session.allreduce(np.ones(5))

    with pytest.raises(StepMismatch, match=r"step 3: .*function of server 2 returned after step 2"):
        jobs.launch(train, "bcube:2x2", transport=transport)


@pytest.mark.smoke
def test_arrays_that_cannot_be_reduced_are_refused_and_cost_no_step() -> None:
    calls: dict[str, Any] = {
        "dtype": lambda s: s.allreduce(np.array(["a"])),
        "native": lambda s: s.allreduce(np.ones(3, ">f4")),
        "dtype timedelta64": lambda s: s.allreduce(np.ones(3, "m8[s]")),
        "bool has no mean": lambda s: s.allreduce(np.ones(3, bool), op="avg"),
        "root is 2: give the id of a server, 0 to 1": lambda s: s.broadcast(np.ones(3), root=2),
        "empty list": lambda s: s.allreduce([]),
        "one dtype": lambda s: s.allreduce([np.ones(2), np.ones(2, "f4")]),
        "op is 'mean'": lambda s: s.allreduce(np.ones(2), op="mean"),
    }

    def train(session: bml.Session) -> tuple[list[str], float]:
        said = []
        for call in calls.values():
            try:
                call(session)
            except UsageError as error:
                said.append(str(error))
        return said, float(session.allreduce(np.ones(1))[0])

    result = jobs.launch(train, "bcube:2x1")
    for said, total in result.values.values():
        assert total == 2
        assert len(said) == len(calls)
        for message, text in zip(calls, said, strict=True):
            assert message in text
    assert result.report["steps"] == 1


@pytest.mark.smoke
def test_a_batch_must_be_ended() -> None:
    def train(session: bml.Session) -> None:
        for _ in session.batches(10, global_batch=5, epochs=1):
            pass

    with pytest.raises(UsageError, match=r"call batch\.allreduce"):
        jobs.launch(train, "bcube:2x1")


def test_recompute_must_return_the_same_shape() -> None:
    def train(session: bml.Session) -> None:
        for batch in session.batches(100, global_batch=9, epochs=1):
            batch.allreduce(np.ones(4), recompute=lambda indices: np.ones(3))

    with pytest.raises(UsageError, match="recompute returned"):
        jobs.launch(train, faults=["kill:4@step=4"])


def test_tiny_and_large_sums_are_exact_before_and_after_two_failures_at_once() -> None:
    """Tiny ones are exchanged while the fabric is healthy; both kinds are packed when two parts are dead."""

    def train(session: bml.Session) -> dict[str, Any]:
        me = session.server
        tiny, large = np.arange(3, dtype=np.int64) + me, np.arange(1 << 17, dtype=np.int64) * (me + 1)
        sums = [(session.allreduce(tiny), session.allreduce(large)) for _ in range(10)]
        return {"sums": sums, "view": session.contributors}

    # Servers silence their ends of the switch one by one; reports of that are gathered for detect_s / 4.
    result = jobs.launch(train, faults=["switch:1/0@step=7", "cut:5/0@step=7"], detect_s=2.0)
    assert sorted(result.values) == list(range(9)), "no server was lost"
    assert set(result.report["views"][-1]["failures"]) == {"switch:1/0", "link:5/0"}
    for value in result.values.values():
        assert value["view"] == tuple(range(9))
        for tiny, large in value["sums"]:
            np.testing.assert_array_equal(tiny, 9 * np.arange(3) + 36)
            np.testing.assert_array_equal(large, 45 * np.arange(1 << 17))
