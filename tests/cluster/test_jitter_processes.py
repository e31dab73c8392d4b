"""A NIC with jitter, of a real process: what it carries is late, and nobody is lost for it."""

from __future__ import annotations

import time

import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

DELAY_S, FOR_S = 0.1, 1.5


@pytest.mark.serial("what a NIC with jitter carries is late")
def test_what_a_nic_with_jitter_carries_is_late_and_nobody_is_lost() -> None:
    def train(session: bml.Session) -> list[float]:
        took, since = [], time.monotonic()
        end = since + 2.5
        while session.allreduce(np.array([time.monotonic() < end]).astype(np.int32), op="min")[0]:
            took.append(time.monotonic() - since)
            since = time.monotonic()
        return took

    result = bml.launch(
        train,
        "bcube:2x1",
        launcher="processes",
        transport="tcp",
        prints=False,
        detect_s=2.0,
        faults=[f"jitter:1/0@step=20,delay={DELAY_S * 1000:.0f}ms,for={FOR_S}s"],
    )
    took = np.array(result.values[0])
    assert len(result.report["views"]) == 1
    # Every step needs the NIC, which stands still fifteen times or so, for half of the delay in the mean.
    late = took[took > DELAY_S / 4]
    assert 4 <= len(late) <= 3 * FOR_S / DELAY_S
    assert late.sum() >= FOR_S / 6
    assert len(took) > 4 * len(late), "most steps meet a NIC that works"
