"""One connection stands still while heartbeats pass: named, routed round, and used again when it carries."""

from __future__ import annotations

import time

import jobs
import numpy as np
import pytest

import bml

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

NEXT_COMMIT_S = 3.0


def train_until_healed() -> bml.Result:
    """A job in which the connection between 4/0 and 3/0 stands still for 2 s, until it is used again."""

    def train(session: bml.Session) -> tuple[int, float]:
        commits_s: list[float] = []
        broken = healed = False
        # All stop together: the decision is part of what they reduce.
        while not session.allreduce(np.array([healed]).astype("i4"), op="min")[0]:
            broken = broken or bool(session.view.failures)
            healed = broken and not session.view.failures
            total = session.allreduce(np.full(100_000, session.server, np.float32))
            assert (total == 36).all()
            commits_s.append(time.monotonic())
            time.sleep(0.005)
        return len(commits_s), float(np.diff(commits_s).max())

    return jobs.launch(train, faults=["stall:4/0,peer=3@step=20,for=2s"], detect_s=0.5)


@pytest.mark.serial("a step is committed before what stands still goes on")
def test_a_connection_that_stands_still_for_a_while() -> None:
    result = train_until_healed()
    views = result.report["views"]
    assert [view["failures"] for view in views] == [[], ["link:3/0"], []]
    assert (
        views[1]["reason"]
        == "the data connection between NIC 3/0 and 4/0 stands still though heartbeats pass"
    )
    assert 0.5 <= views[1]["noticed_s"] < NEXT_COMMIT_S
    assert "link:3/0 works again" in views[2]["reason"]
    assert sorted(result.values) == list(range(9)), "nobody is lost"
    assert len({steps for steps, _ in result.values.values()}) == 1
    assert max(gap_s for _, gap_s in result.values.values()) < NEXT_COMMIT_S
