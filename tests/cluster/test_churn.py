"""Nine servers that come and go at random: nothing is lost, taken twice, or different anywhere, and no hang.

The length and the seed are BML_SOAK_SECONDS and BML_SOAK_SEED (make soak SECONDS=600 SEED=7).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import churn
import pytest

from bml.pytest_plugin import seed_of

SECONDS = float(os.environ.get("BML_SOAK_SECONDS", "5"))

pytestmark = [pytest.mark.real, pytest.mark.timeout(SECONDS + 120)]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_servers_come_and_go_and_every_step_is_right(
    transport: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = int(os.environ.get("BML_SOAK_SEED") or seed_of(pytestconfig))
    run = churn.Churn(tmp_path, SECONDS, seed, transport)
    result = run.run()
    report = result.report
    print(f"seed {seed}, {SECONDS:g} s:", json.dumps(run.figures(result)))
    for view in run.views(result):
        print(view["epoch"], view["commit"], view["reason"], view["recover_s"])
    assert len(result.values) >= churn.FEWEST - 1, result.dead
    assert len(set(report["digests"].values())) == 1, "they hold different bits"
    assert len({str(each.samples) for each in result.reports.values()}) == 1, "their ledgers differ"
    *closed, last = report["samples"]["loops"][0]["epochs"]
    assert all(epoch["complete"] for epoch in closed), "a sample was used never, or twice"
    assert (last["used_more"], last["left_out"]) == (0, 0)
    (taken,) = {value["taken"] for value in result.values.values()}
    assert sorted(run.commits()) == list(range(1, taken + 1)), "a step is missing"
    assert run.tried, "nothing happened"
