"""Spares: processes, or actors, that wait with all imports done, and take the places of lost servers."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml

pytestmark = pytest.mark.timeout(240)

EPOCHS = 40
MODULE = """
import os
with open({file!r}, "a") as seen:
    seen.write(f"{{os.getpid()}}\\n")
RATE = 0.1
"""


def wait_for(condition: Any) -> Any:
    deadline = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def _all_have_answered(now: dict[str, Any]) -> bool:
    return len(now["servers"]) == 4 and all("process" in each for each in now["servers"].values())


@pytest.mark.parametrize(
    "launcher",
    [pytest.param("processes", marks=pytest.mark.real), pytest.param("ray", marks=pytest.mark.ray)],
)
def test_a_spare_takes_the_place_of_a_dead_server_and_the_next_one_stays_lost(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importers, go = tmp_path / "importers", tmp_path / "go"
    (tmp_path / "slowly_imported.py").write_text(MODULE.format(file=str(importers)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slowly_imported", raising=False)  # that of the other launcher's test
    import slowly_imported  # type: ignore[import-not-found]

    def train(session: bml.Session) -> Any:
        while not go.exists():
            time.sleep(0.005)
        was_replaced, n_steps = session.joins, 0

        def pause() -> None:
            """From step 20 on long, so that the spare is in before step 190, however busy the machine is."""
            nonlocal was_replaced, n_steps
            n_steps += 1
            was_replaced = was_replaced or 3 not in session.contributors
            if not (session.replays or (was_replaced and 3 in session.contributors)):
                time.sleep(0.05 if n_steps <= 20 else 0.25)

        w = jobs.descend(session, epochs=EPOCHS, pause=pause, rate=slowly_imported.RATE)["params"]
        return w, os.getpid()

    faults = ["kill:1@step=190"]
    with bml.start(
        train, "bcube:2x2", launcher=launcher, transport="tcp", start_s=120, spares=1, faults=faults
    ) as job:
        wait_for(lambda: len(importers.read_text().split()) >= 1 + 4 + 1)  # the launcher, servers, the spare
        wait_for(lambda: job.status()["spares"] == 1)
        status = wait_for(lambda: (now := job.status()) and _all_have_answered(now) and now)
        go.touch()
        wait_for(lambda: job.status()["servers"][0].get("step", 0) >= 20)
        os.kill(status["servers"][3]["process"], signal.SIGKILL)
        result = job.wait(90)
        assert job.status()["spares"] == 0

    report = result.report
    views = report["views"]
    print("views:", *((v["epoch"], v["at_s"], v["commit"], v["reason"]) for v in views), report["dead"])
    imported = [int(line) for line in importers.read_text().split()]
    assert sorted(result.values) == [0, 2, 3]
    first = [each["process"] for each in status["servers"].values()]
    assert result.values[3][1] == next(each for each in imported[1:] if each not in first), "no spare"
    assert len(imported) == 6, "nothing was imported after the death"
    assert list(report["dead"]) == [1], "there was no spare for the second one"
    assert len(set(report["digests"].values())) == 1, "they hold different bits"
    assert report["samples"]["complete"], "a sample was used never, or twice"
    np.testing.assert_allclose(result.value[0], jobs.reference(EPOCHS), rtol=1e-4, atol=1e-5)
