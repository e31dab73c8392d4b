"""The pool reuses memory, but never while a view of it exists, and keeps little more than is needed."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bml.cluster.fleets.fork_server import ONE_THREAD
from bml.cluster.process.imports import what_we_import
from bml.io import mapping
from bml.io.mapping import PrivateMemory
from bml.io.memory import RegisteredPool, private_pool
from bml.sharedmem import SharedPool

FLOAT = np.dtype(np.float32)
LARGE = 1 << 16
MIB = 1 << 20

Made = list[int]


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.fixture
def made() -> Made:
    """The bytes of all regions that were made."""
    return []


@pytest.fixture
def pool(made: Made) -> RegisteredPool:
    def make(nbytes: int) -> PrivateMemory:
        made.append(nbytes)
        return PrivateMemory(nbytes)

    return RegisteredPool(MIB, make=make)


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
@pytest.mark.parametrize("kind", [private_pool, SharedPool])
def test_any_view_keeps_it(look: Callable[[Any], Any], kind: Callable[[], RegisteredPool]) -> None:
    memory = kind()
    array = memory.empty(LARGE, FLOAT)
    array[:] = 7
    view = look(array)
    before = bytes(view)
    del array
    other = memory.empty(LARGE, FLOAT)
    other[:] = 9
    assert bytes(view) == before
    assert memory.nbytes - memory.free_nbytes == 2 * LARGE * 4
    del view, other
    assert memory.nbytes == memory.free_nbytes


def test_memory_serves_again_when_its_array_is_gone() -> None:
    memory = private_pool()
    first = memory.empty(LARGE, FLOAT)
    assert (first.shape, first.dtype) == ((LARGE,), FLOAT)
    assert first.flags.writeable
    assert first.flags.c_contiguous
    where = address(first)
    del first
    assert address(memory.empty(LARGE - 100, np.dtype(np.int32))) == where


def test_small_and_empty_arrays_are_of_the_heap() -> None:
    memory = private_pool()
    assert memory.empty(0, FLOAT).size == 0
    assert memory.empty(3, np.dtype(np.complex128)).nbytes == 48
    assert memory.nbytes == 0


def test_results_that_are_held_never_change(pool: RegisteredPool) -> None:
    """A random user, who keeps some results for some time: each still holds what was written into it."""
    chance = random.Random(3)
    held: list[tuple[int, np.ndarray]] = []
    for number in range(600):
        array = pool.empty(chance.choice([100, LARGE, 2 * LARGE, 3 * LARGE, 12 * LARGE]), FLOAT)
        array[:] = number
        held.append((number, array))
        del array
        chance.shuffle(held)
        del held[chance.randrange(6) :]
        assert all((kept == wanted).all() for wanted, kept in held)
    assert pool.nbytes <= 16 * 12 * LARGE * 4


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_sizes_drawn_anew_take_what_is_needed_at_one_time(
    pool: RegisteredPool, made: Made, at_a_time: int
) -> None:
    chance, largest = random.Random(5), 32 * MIB
    held: list[np.ndarray] = []
    most = 0
    for _ in range(1000):
        if len(held) == at_a_time:
            held.pop(0)
        held.append(pool.empty(chance.randint(1, largest), "uint8"))
        most = max(most, pool.nbytes)
    print(most / largest, len(made))
    assert most <= 1.5 * at_a_time * largest
    assert len(made) < 60, "most sizes need no new memory"


def test_what_is_needed_no_more_is_given_up(pool: RegisteredPool) -> None:
    pool.empty(32 * MIB, "uint8")
    assert pool.nbytes == 40 * MIB
    for _ in range(600):
        pool.empty(MIB, "uint8")
    assert pool.nbytes == MIB


def test_sizes_that_come_again_make_nothing_anew(pool: RegisteredPool, made: Made) -> None:
    """One iteration is like the other: buckets that live until its end, and a large vector now and then."""

    def iteration() -> None:
        kept = [pool.empty(nbytes, "uint8") for nbytes in (MIB, 7 * MIB, 3 * MIB, 5000, 12 * MIB)]
        for nbytes in (MIB // 2, 24 * MIB, MIB // 4, 2 * MIB):
            pool.empty(nbytes, "uint8")
        del kept

    for _ in range(4):
        iteration()
    n_made = len(made)
    for _ in range(200):
        iteration()
    assert len(made) == n_made


@pytest.mark.slow
def test_a_small_array_keeps_no_large_region(pool: RegisteredPool) -> None:
    kept = []
    for _ in range(100):
        large = pool.empty(10 * MIB, "uint8")
        del large
        kept.append(pool.empty(1000, "uint8"))
    assert pool.nbytes <= 2 * 12.5 * MIB
    del kept
    gc.collect()


def test_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutHugePages:
        mmap, munmap = mapping._libc.mmap, mapping._libc.munmap

        @staticmethod
        def madvise(*_: object) -> int:
            return -1  # EINVAL

    monkeypatch.setattr(mapping, "_libc", WithoutHugePages)
    array = private_pool().empty(LARGE, FLOAT)
    array[:] = 3
    assert array.sum() == 3 * LARGE


_FORKING = """
import ctypes, faulthandler, gc, os, sys
import numpy as np
from bml.io.memory import RegisteredPool, private_pool
from bml.sharedmem import SharedPool

FLOAT, LARGE = np.dtype(np.float32), 1 << 16


def in_child(fork, act):
    # What becomes of a child that does that: 0, or the signal that ended it, negative.
    child = fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def what_a_child_writes_is_its_own(memory, closed):
    arrays = [memory.empty(n, FLOAT) for n in (LARGE, 5 * LARGE, 40 * LARGE)]
    for number, array in enumerate(arrays):
        array[:] = number
    if closed:
        memory.close()
    fds = len(os.listdir("/proc/self/fd"))

    def act():
        assert len(os.listdir("/proc/self/fd")) <= fds
        for number, array in enumerate(arrays):
            assert (array == number).all()
            array[:] = -1
            assert (array == -1).all()
        other = memory.empty(LARGE, FLOAT)
        other[:] = -2
        arrays.clear()
        gc.collect()
        memory.empty(50 * LARGE, FLOAT)[:] = -3

    with memory._lock:  # by another thread
        assert in_child(os.fork, act) == 0
    for number, array in enumerate(arrays):
        assert (array == number).all()
        array[:] = number + 10
        assert (array == number + 10).all()


def a_child_of_which_python_does_not_hear_cannot_write(memory):
    array = memory.empty(LARGE, FLOAT)
    array[:] = 5

    def act():
        faulthandler.disable()
        array[:] = 6

    print(in_child(ctypes.PyDLL(None).fork, act))
    assert (array == 5).all()


assert os.listdir("/proc/self/task") == [str(os.getpid())]
"""


def forked(call: str) -> str:
    """Run one of these in a process of one thread, and return what it prints.

    A thread of the tests may hold a lock, such as that of malloc, which a child of theirs would wait for.
    """
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{_FORKING}\n{call}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **what_we_import(), **ONE_THREAD},
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


POOLS = ["private_pool", "SharedPool", "RegisteredPool"]


@pytest.mark.slow
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", POOLS)
def test_what_a_child_writes_is_its_own(kind: str, closed: bool) -> None:
    forked(f"what_a_child_writes_is_its_own({kind}(), {closed})")


@pytest.mark.slow
@pytest.mark.parametrize("kind", POOLS[1:])
def test_a_child_of_which_python_does_not_hear_cannot_write(kind: str) -> None:
    printed = forked(f"a_child_of_which_python_does_not_hear_cannot_write({kind}())")
    assert int(printed) == -signal.SIGSEGV
