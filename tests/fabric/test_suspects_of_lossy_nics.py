"""`--preempt-suspects` on real cables: a NIC that loses packets is taken out, and its server stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bml
from bml.fabric import Damage
from bml.pytest_plugin import BringUp

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

N = 1 << 18
#: What is usual is known after some seconds, a warning stands for 3 s, and the launcher looks once a second.
SETTLES_S, WITHIN_S = 8.0, 60.0
#: A connection that loses packets may stand still for half a second; here it is the warning that counts.
DETECT_S = 2.0


def training(stop: Path) -> Any:
    """Sums until `stop` is there, each compared with the exact one by every server."""

    def train(session: bml.Session) -> int:
        sums, x = 0, session.empty(N)
        while True:
            n = len(session.view.members)
            x[:] = np.arange(N) % 64
            x[-1] = stop.exists()
            total = session.allreduce(x)
            np.testing.assert_array_equal(total[:-1], np.arange(N - 1) % 64 * np.float32(n))
            sums += 1
            if total[-1]:
                return sums

    return train


def test_a_lossy_nic_is_taken_out_and_its_server_stays(emulated_fabric: BringUp, tmp_path: Path) -> None:
    network = emulated_fabric("bcube:3x2", "20mbit")
    stop = tmp_path / "stop"
    where = {"launcher": "processes", "emulated": network.name, "prints": False, "detect_s": DETECT_S}
    with bml.start(training(stop), network.fabric.name, preempt_suspects=True, **where) as job:
        time.sleep(SETTLES_S)
        assert job.status()["failures"] == []
        network.damage(Damage.parse("loss:2/0,share=3%"))
        until_s = time.monotonic() + WITHIN_S
        while not job.status()["failures"] and time.monotonic() < until_s:
            time.sleep(0.2)
        assert job.status()["failures"] == ["link:2/0"]
        stop.touch()
        result = job.wait()
    assert sorted(result.values) == list(range(9))
    assert len(set(result.values.values())) == 1
    # A NIC that loses packets is slow, too: trees may go round it before it is taken out.
    (out, *_) = damaged = [view for view in result.report["views"] if view["failures"]]
    assert all(view["failures"] == ["link:2/0"] for view in damaged)
    assert "early warning" in out["reason"], out["reason"]
