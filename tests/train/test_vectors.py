"""Arrays as one vector: what is copied, what is refused, which dtypes sums and means have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bml.topology.errors import UsageError
from bml.train.vectors import Bucket, Empty, divide, flatten, unflatten


@pytest.fixture
def memory() -> Empty:
    return np.empty


def test_arrays_lie_as_they_are_and_lists_are_copied(memory: Empty) -> None:
    one = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(flatten(one, memory)[0], one)
    for count in (1, 2):
        vector, shapes, _ = flatten([one] * count, memory)
        assert not np.shares_memory(vector, one)
        assert [part.tolist() for part in unflatten(vector, shapes, True)] == [one.tolist()] * count
    vector = np.arange(6.0)
    bucket = Bucket((vector[:2], vector[2:].reshape(2, 2)))
    bucket.vector = vector
    assert np.shares_memory(flatten(bucket, memory)[0], vector)


@pytest.mark.parametrize(
    "arrays",
    [[np.ones(2, "f4"), np.ones(2, "f4"), np.ones(2)], [np.ones(2), np.ones(2, "f4")], [], np.array(["a"])],
)
def test_what_cannot_be_reduced_together_is_refused(arrays: Any, memory: Empty) -> None:
    with pytest.raises(UsageError):
        flatten(arrays, memory)


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        ("uint8", "uint64"),
        ("int16", "int64"),
        ("int64", "int64"),
        ("float16", "float16"),
        ("float32", "float32"),
    ],
)
def test_narrow_integers_are_summed_in_64_bits(given: str, wide: str, memory: Empty) -> None:
    for arrays in (np.full(3, 100, given), [np.full(3, 100, given)]):
        vector, _, dtype = flatten(arrays, memory, widened=True)
        assert (vector.dtype, dtype, vector.tolist()) == (wide, wide, [100] * 3)
        assert flatten(arrays, memory)[2] == given


@pytest.mark.parametrize("n", [0, 1, 3, 70_000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int64"])
@pytest.mark.parametrize("writeable", [True, False])
def test_a_mean_is_over_the_samples_that_were_used(n: int, dtype: str, writeable: bool) -> None:
    total = np.full(3, 60, dtype)
    total.flags.writeable = writeable
    with np.errstate(all="raise"):
        mean = divide(total, n, np.empty)
    assert mean.dtype == ("float64" if dtype == "int64" else dtype)
    np.testing.assert_allclose(mean, np.full(3, 60 / max(n, 1)), rtol=1e-3)
