"""bfloat16 against exact arithmetic: every number widened, and rounded to the nearest, ties to even."""

from __future__ import annotations

import struct
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest

from bml.train.bfloat16 import BFLOAT16, from_float32, is_bfloat16, to_float32

EVERY = np.arange(1 << 16, dtype=np.uint16)
FINITE = range(0x7F80)  # those that are not negative, in order


def exact(bits: int) -> Fraction:
    """The value of a bfloat16 that is not negative, from the definition of the format."""
    exponent, fraction = bits >> 7, bits & 0x7F
    if exponent == 0:
        return Fraction(fraction, 128) * Fraction(2) ** -126
    return (1 + Fraction(fraction, 128)) * Fraction(2) ** (exponent - 127)


VALUES = [exact(bits) for bits in FINITE]


def nearest(number: float) -> int:
    """The bits of the nearest bfloat16; of two, the even one. The one after the largest is infinite."""
    if number < 0 or struct.pack(">f", number)[0] >> 7:
        return 0x8000 | nearest(-number)
    if number == float("inf"):
        return 0x7F80
    value = Fraction(number)
    above = bisect_left(VALUES, value)
    candidates = [each for each in (above - 1, above) if 0 <= each <= 0x7F80]
    distance = {
        each: abs((VALUES[each] if each < 0x7F80 else Fraction(2) ** 128) - value) for each in candidates
    }
    return min(candidates, key=lambda each: (distance[each], each & 1))


def test_every_number_is_widened_exactly() -> None:
    wide = to_float32(EVERY)
    assert wide.dtype == np.float32
    for bits in FINITE:
        assert Fraction(float(wide[bits])) == VALUES[bits]
        assert Fraction(float(wide[bits | 0x8000])) == -VALUES[bits]
    assert struct.pack(">f", wide[0x8000])[0] == 0x80, "minus zero"
    assert wide[0x7F80] == np.inf
    assert wide[0xFF80] == -np.inf
    assert np.isnan(wide[0x7F81:0x8000]).all()
    assert np.isnan(wide[0xFF81:]).all()


def test_every_number_comes_back_and_only_signalling_nans_become_quiet() -> None:
    back = from_float32(to_float32(EVERY))
    is_nan = (EVERY & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(back[~is_nan], EVERY[~is_nan])
    np.testing.assert_array_equal(back[is_nan], EVERY[is_nan] | 0x0040)


@pytest.mark.slow
def test_rounding_is_to_the_nearest_and_ties_go_to_even() -> None:
    chance = np.random.default_rng(0)
    raw = chance.integers(0, 1 << 32, 20_000, dtype=np.uint32)
    near = chance.integers(0, 0x7F80, 3000).astype(np.uint32) << 16
    edges = [near, near + 0x7FFF, near + 0x8000, near + 0x8001, near + 0xFFFF]
    named = np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000], np.uint32
    )
    subnormal = chance.integers(0, 0x00800000, 3000, dtype=np.uint32)
    positive = np.concatenate([named, subnormal, *edges])
    numbers = np.concatenate([raw, positive, positive | np.uint32(1 << 31)]).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    expected = np.array([nearest(float(each)) for each in numbers], np.uint16)
    np.testing.assert_array_equal(from_float32(numbers), expected)


def test_nans_stay_nans_though_only_their_lower_bits_say_so() -> None:
    raw = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC01234], np.uint32)
    assert [hex(each) for each in from_float32(raw.view(np.float32))] == [
        "0x7fc0",
        "0xffc0",
        "0x7fff",
        "0xffff",
        "0x7fc0",
    ]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (70_001,)])
def test_shapes_stay_and_memory_that_is_given_is_used(shape: tuple[int, ...]) -> None:
    bits = np.full(shape, 0x4049, np.uint16)
    wide, narrow = np.empty(shape, np.float32), np.empty(shape, np.uint16)
    assert to_float32(bits, wide) is wide
    assert from_float32(wide, narrow) is narrow
    np.testing.assert_array_equal(wide, np.full(shape, 3.140625, np.float32))
    np.testing.assert_array_equal(narrow, bits)
    turned = to_float32(np.array([[1, 2], [3, 4]], np.uint16).T)
    np.testing.assert_array_equal(turned.view(np.uint32) >> 16, [[1, 3], [2, 4]])


def test_its_dtype_is_known() -> None:
    assert is_bfloat16(BFLOAT16)
    assert not any(is_bfloat16(np.dtype(each)) for each in ("u2", "f2", "f4", "V2", "O"))


def test_the_dtype_of_ml_dtypes_is_known_and_rounds_alike() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert is_bfloat16(np.dtype(ml_dtypes.bfloat16))
    numbers = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    with np.errstate(over="ignore"):
        theirs = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(from_float32(numbers), theirs)
