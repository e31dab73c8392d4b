"""The places of parts in a vector: a sum gives every part. The parcel with shape and dtype of a root."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bml.errors import UsageError
from bml.protocol.step.workspace import Padded, written
from bml.train.bfloat16 import BFLOAT16
from bml.train.operations.parcel import PARCEL_NBYTES, pack, unpack
from bml.train.operations.places import Places, source


def dirty(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Memory as it was used before: what is not written is seen."""
    return np.full(size * np.dtype(dtype).itemsize, 0x5A, np.uint8).view(dtype)


@pytest.mark.parametrize("seed", range(40))
def test_a_sum_gives_every_part_in_its_place(seed: int) -> None:
    """Rows of places are brought by the ranks in turn; some bring none, and those are zeros."""
    chance = random.Random(seed)
    n, width = chance.randint(1, 5), chance.randint(1, 4)
    parts = [
        np.frombuffer(chance.randbytes(chance.choice((0, 1, 3, 8, 24, 40, 70_001))), np.uint8)
        for _ in range(n * width)
    ]
    absent = chance.randrange(n) if chance.random() < 0.3 else n
    places = Places([part.size for part in parts])
    rows = [parts[rank * width : (rank + 1) * width] if rank != absent else [] for rank in range(n)]
    brought = [written(places.vector(rank * width, row, dirty)) for rank, row in enumerate(rows)]
    assert len({(vector.shape, vector.dtype) for vector in brought}) == 1
    assert brought[0].nbytes == sum(part.size for part in parts)
    total = sum(brought[1:], start=brought[0])
    for place, part in enumerate(parts):
        awaited = bytes(part.size) if place // width == absent else part.tobytes()
        assert places.part(total, place).tobytes() == awaited


@pytest.mark.parametrize("nbytes", [16, 13])
def test_a_part_that_fills_the_vector_is_not_copied(nbytes: int) -> None:
    whole = np.arange(nbytes + 1, dtype=np.uint8)
    places = Places([nbytes])
    assert np.shares_memory(written(places.vector(0, [whole[:nbytes]], dirty)), whole)
    unaligned = written(places.vector(0, [whole[1:]], dirty))
    assert unaligned.flags.aligned
    assert unaligned.tobytes() == whole[1:].tobytes()


def test_zeros_of_a_long_vector_are_left_out() -> None:
    part = np.full(100_003, 7, np.uint8)
    brought = Places([100_005, part.size, 40_000]).vector(1, [part], dirty)
    assert isinstance(brought, Padded)
    assert (brought.start, brought.stop) == (100_000 // 8, -(-200_008 // 8))
    data = brought.vector.view(np.uint8)
    assert data[:100_000].tolist() == [0x5A] * 100_000
    assert data[100_000:200_008].tolist() == [0] * 5 + [7] * part.size
    assert (data[200_008:] == 0x5A).all()
    assert not isinstance(Places([1000, 1000]).vector(1, [part[:1000]], dirty), Padded)


def test_the_lowest_contributor_stands_for_a_lost_rank() -> None:
    assert [source(rank, (1, 2, 4)) for rank in range(5)] == [1, 1, 2, 1, 4]


@pytest.mark.parametrize("dtype", ["<f8", ">i2", "<U3", "<M8[25s]", "?", BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 1), (2,) * 62 + (1, 1), (10,) * 18 + (1,) * 46])
def test_a_parcel_tells_shape_and_dtype(shape: tuple[int, ...], dtype: Any) -> None:
    packed = pack(shape, np.dtype(dtype))
    assert packed.shape == (PARCEL_NBYTES,)
    assert unpack(packed) == (shape, np.dtype(dtype))


def test_a_dtype_that_is_unknown_here_is_named() -> None:
    packed = np.frombuffer(b'["made_up", [3]]'.ljust(PARCEL_NBYTES), np.uint8)
    with pytest.raises(UsageError, match="dtype made_up, which is not known here"):
        unpack(packed)
