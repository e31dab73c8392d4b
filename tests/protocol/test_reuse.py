"""Memory of steps is used again, but never while anybody can still see it."""

import random

import numpy as np
import pytest

from bml.protocol.reuse import StepMemory

FLOAT = np.dtype(np.float32)
LARGE = 1 << 16


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_serves_again_when_its_array_is_gone() -> None:
    memory = StepMemory()
    first = memory.empty(LARGE, FLOAT)
    assert (first.shape, first.dtype) == ((LARGE,), FLOAT)
    assert first.flags.writeable
    assert first.flags.c_contiguous
    where = address(first)
    assert memory.idle_nbytes == 0
    del first
    assert memory.idle_nbytes == LARGE * 4
    assert address(memory.empty(LARGE - 100, np.dtype(np.int32))) == where


@pytest.mark.parametrize(
    "look",
    [
        lambda array: array[10:20],
        lambda array: array[:64].reshape(8, 8)[2:, ::2].T,
        lambda array: memoryview(array.data).cast("B")[100:200],
        lambda array: array[5:].view(np.uint8),
        lambda array: np.split(array, 4)[3],
    ],
)
def test_any_view_keeps_it(look) -> None:
    memory = StepMemory()
    array = memory.empty(LARGE, FLOAT)
    array[:] = 7
    view = look(array)
    before = bytes(view)
    del array
    other = memory.empty(LARGE, FLOAT)
    other[:] = 9
    assert bytes(view) == before
    del view, other
    assert memory.idle_nbytes == 2 * LARGE * 4


def test_results_that_are_held_never_change() -> None:
    """A random user, who keeps some results for some time: each still holds what was written into it."""
    memory, chance = StepMemory(), random.Random(3)
    held: list[tuple[int, np.ndarray]] = []
    for number in range(400):
        array = memory.empty(chance.choice([100, LARGE, 2 * LARGE, 3 * LARGE]), FLOAT)
        array[:] = number
        held.append((number, array))
        del array
        chance.shuffle(held)
        del held[chance.randrange(6) :]
        assert all((kept == wanted).all() for wanted, kept in held)
    assert memory.idle_nbytes <= 16 * 3 * LARGE * 4


def test_what_nobody_needs_any_more_is_given_up() -> None:
    memory = StepMemory()
    del [memory.empty(1 << 22, FLOAT)][:]
    assert memory.idle_nbytes == 1 << 24
    for _ in range(70):
        memory.empty(LARGE, FLOAT)
    assert memory.idle_nbytes == LARGE * 4


def test_memory_that_is_much_too_large_is_left_for_those_who_need_it() -> None:
    memory = StepMemory()
    large = memory.empty(1 << 20, FLOAT)
    where = address(large)
    del large
    small = memory.empty(LARGE, FLOAT)
    assert address(memory.empty(1 << 20, FLOAT)) == where
    assert address(small) != where


def test_small_and_empty_arrays() -> None:
    memory = StepMemory()
    assert memory.empty(0, FLOAT).size == 0
    assert memory.empty(3, np.dtype(np.complex128)).nbytes == 48
    assert memory.idle_nbytes == 0
