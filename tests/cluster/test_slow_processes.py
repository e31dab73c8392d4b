"""A slow NIC without real cables: the kernels at both ends pace the connections."""

from __future__ import annotations

import time

import numpy as np
import pytest

import bml
from bml.errors import UsageError

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

NBYTES, RATE_BIT = 1 << 20, 40_000_000
#: Of two servers each sends its half of the vector to the other, and then the sum of the half that it got.
STEP_S = NBYTES * 8 / RATE_BIT


@pytest.mark.serial("a slow NIC has a rate")
@pytest.mark.parametrize("direction", ["out", "in", "both"])
def test_a_slow_nic_carries_what_it_says(direction: str) -> None:
    def train(session: bml.Session) -> list[float]:
        took, since = [], time.monotonic()
        for _ in session.steps(12):
            result = session.allreduce(np.ones(NBYTES // 4, np.float32))
            assert (result == 2).all()
            took.append(time.monotonic() - since)
            since = time.monotonic()
        return took

    result = bml.launch(
        train,
        "bcube:2x1",
        launcher="processes",
        prints=False,
        algorithm="bml",
        faults=[f"slow:1/0@step=2,rate=40mbit,direction={direction},for=1.2s"],
    )
    took = result.values[0]
    # Buffers of the kernel have taken a part of a step before the clock of the first one starts.
    assert np.median(took[3:6]) >= 0.8 * STEP_S
    assert min(took[2:6]) <= 1.2 * STEP_S
    assert min(took[-3:]) < STEP_S / 2, "it is over"
    assert len(result.report["views"]) == 1


@pytest.mark.parametrize("transport", ["shm", "verbs,tcp"])
def test_data_that_takes_no_sockets_cannot_be_paced(transport: str) -> None:
    with pytest.raises(UsageError, match="slow is made on sockets, which the data of this job does not take"):
        bml.launch(
            print,
            "bcube:2x1",
            launcher="processes",
            transport=transport,
            faults=["slow:1/0@step=2,rate=40mbit"],
        )
