"""A busy server, as a real process: its computation is slow, and its heartbeats are not."""

from __future__ import annotations

import time

import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

COMPUTE_S, SHARE, STEPS = 0.06, 0.9, 12
BUSY_S = COMPUTE_S / (1 - SHARE)


@pytest.mark.serial("a busy server takes a share of the time longer")
def test_a_busy_server_computes_slowly_for_a_time_and_is_not_missed() -> None:
    def train(session: bml.Session) -> list[float]:
        took, since = [], time.monotonic()
        for _ in session.steps(STEPS):
            time.sleep(COMPUTE_S)
            session.allreduce(np.ones(10))
            took.append(time.monotonic() - since)
            since = time.monotonic()
        return took

    result = bml.launch(
        train,
        "bcube:2x1",
        launcher="processes",
        transport="tcp",
        prints=False,
        detect_s=0.4,  # less than one step of the busy server
        faults=[f"busy:1@step=5,share={SHARE:.0%},for=1.5s"],
    )
    took = result.values[0]
    assert min(took[:4]) < BUSY_S / 2
    # The fault strikes in the middle of step 5 and holds for two steps or more of 0.6 s each.
    assert took[5] >= BUSY_S
    assert min(took[5:7]) < 2 * BUSY_S
    assert min(took[9:]) < BUSY_S / 2, "it is over"
    assert len(result.report["views"]) == 1
