"""A cable that is dead for a while is used again, in the same job, and nothing is lost meanwhile."""

from __future__ import annotations

import time

import jobs
import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


def test_a_black_hole_that_ends() -> None:
    def train(session: bml.Session) -> float:
        total, broken, healed = 0.0, False, False
        # All stop together: the decision is part of what they reduce.
        while not session.allreduce(np.array([healed]).astype("i4"), op="min")[0]:
            broken = broken or bool(session.view.failures)
            healed = broken and not session.view.failures
            total += float(session.allreduce(np.full(1000, session.server, np.float32))[0])
            time.sleep(0.005)
        return total / 36

    result = jobs.launch(train, faults=["blackhole:2/0@step=20,for=4s"], detect_s=1.5)
    assert len(set(result.values.values())) == 1
    assert result.value == int(result.value) > 10
    assert len(result.values) == 9
    assert [view["failures"] for view in result.report["views"]] == [[], ["link:2/0"], []]
    assert "link:2/0 works again" in result.report["views"][2]["reason"]
