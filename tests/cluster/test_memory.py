"""What steps need beside inputs and outputs, as the kernel counts it: at most two vectors, whatever fails."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

NBYTES = 16 << 20


def resident(which: str) -> int:
    """`VmRSS`, or its highest value `VmHWM` since `forget`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise AssertionError(which)


def forget() -> None:
    """Begin to watch the highest value anew."""
    Path("/proc/self/clear_refs").write_text("5")


def extra(session: bml.Session, arrays: Any, n_steps: int) -> float:
    """The most that steps took beside their inputs and outputs, in vectors; the inputs are there before."""
    gc.collect()
    forget()
    before = resident("VmRSS")
    for _ in range(n_steps):
        total = session.allreduce(arrays)
        del total  # else two outputs are there at a time
    return (resident("VmHWM") - before - NBYTES) / NBYTES


def filled(session: bml.Session, dtype: str) -> Any:
    x = session.empty(NBYTES // np.dtype(dtype).itemsize, dtype)
    x[:] = 1
    return x


@pytest.mark.parametrize("dtype", ["uint64", "complex128"])
def test_steps_of_one_array(dtype: str) -> None:
    def train(session: bml.Session) -> float:
        session.allreduce(np.ones(1000))
        return extra(session, filled(session, dtype), 3)

    took = jobs.launch(train, "bcube:2x2").values
    print(took)
    assert max(took.values()) < 1.0, took


def test_a_bucket_and_a_list() -> None:
    def most(bucketed: bool) -> float:
        def train(session: bml.Session) -> float:
            session.allreduce(np.ones(1000))
            bucket = session.bucket([(NBYTES // 16, 2), (NBYTES // 8,)])
            bucket.vector[:] = 1
            return extra(session, bucket if bucketed else list(bucket), 3)

        return max(jobs.launch(train, "bcube:2x2").values.values())

    bucketed, listed = most(True), most(False)
    print(bucketed, listed)
    assert bucketed < 1.0
    assert 1.0 < listed < 2.0, "a list is gathered, which takes a vector more"


@pytest.mark.parametrize("fault", ["kill:3@step=3,phase=reduce", "blackhole:3/1@step=3,phase=broadcast"])
def test_a_fault_in_a_step(fault: str) -> None:
    def train(session: bml.Session) -> float:
        session.allreduce(np.ones(1000))
        return extra(session, filled(session, "float32"), 4)

    took = jobs.launch(train, faults=[fault]).values
    print(took)
    assert max(took.values()) < 2.0, took


TRANSPORTS = {
    "shm": {"transport": "shm"},
    "tcp": {"transport": "tcp"},
    "zero-copy": {"transport": "auto", "algorithm": "bml"},
}


def taken() -> int:
    """Bytes that this process has; what it shares is divided among those that have it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@pytest.mark.parametrize("how", TRANSPORTS)
def test_sizes_drawn_anew_in_every_step(how: str) -> None:
    """It took 8 vectors of the largest size and more, and ever more descriptors."""

    def train(session: bml.Session) -> tuple[float, int]:
        chance, most, descriptors = random.Random(3), 0, 0
        session.allreduce(np.ones(1000))
        before = taken()
        for step in range(50):
            x = session.empty(chance.randint(1, NBYTES // 4), "float32")
            x[:] = step
            total = session.allreduce(x)
            assert total[0] == total[-1] == 4 * step
            most = max(most, taken() - before)
            del x, total
            descriptors = max(descriptors, len(os.listdir("/proc/self/fd")))
        return most / NBYTES, descriptors

    took = jobs.launch(train, "bcube:2x2", **TRANSPORTS[how]).values
    print(took)
    assert max(vectors for vectors, _ in took.values()) < 4.5, took
    assert max(descriptors for _, descriptors in took.values()) < 40, took
