"""Two jobs on one emulated fabric: both add rightly, classes decide who goes first, deaths stay at home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from two_jobs import Load, run
from wires_in_namespaces import goodputs

import bml
from bml import fabric
from bml.fabric import queues
from bml.pytest_plugin import BringUp
from bml.transport.handshake.traffic_class import BULK, NORMAL, URGENT

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

RATE_BIT = 50_000_000
WITHIN_S = 40
LENGTH = 20_000
#: A job of another process: ended from outside, in the middle of its steps.
OTHER = f"""
import sys
from pathlib import Path
import numpy as np
import bml
def train(session):
    for step in session.steps(1_000_000):
        assert (session.allreduce(np.ones({LENGTH}, "f4")) == 4).all()
        if step == 3:
            Path(sys.argv[2]).touch()
bml.launch(train, "bcube:2x2", launcher="processes", emulated=sys.argv[1])
"""


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not path.exists():
        assert time.monotonic() < until_s, f"nothing has made {path.name}"
        time.sleep(0.01)


def adding(begun: Path, stop: Path, after: int) -> Any:
    """Steps of different numbers until the file `stop` is there, and so many more; their number."""

    def train(session: bml.Session) -> int:
        number = left = 0
        w = np.zeros(LENGTH, "float32")
        session.state(w=w)
        while left < after:
            number += 1
            x = np.arange(LENGTH, dtype="float32") % 97 + number + session.server
            x[-1] = stop.exists()
            total = session.allreduce(x)
            expected = 4 * (np.arange(LENGTH - 1, dtype="float32") % 97 + number) + 6
            np.testing.assert_array_equal(total[:-1], expected)
            w += total
            left += bool(total[-1])
            if number == 3:
                begun.touch()
        return number

    return train


def test_an_urgent_and_a_bulk_job_at_once_add_rightly(emulated_fabric: BringUp) -> None:
    """The jobs of the benchmark, which checks every sum: both go on while the other does."""
    network = emulated_fabric("bcube:2x2", "100mbit")
    bulk, small = run(network, [Load(1 << 20, 0.0, BULK), Load(4096, 0.001, URGENT)], seconds=0.5)
    assert min(len(bulk), len(small)) > 0
    assert small[0][0] < bulk[-1][1], "they ran at the same time"
    assert bulk[0][0] < small[-1][1]
    assert network.status()["failures"] == []


def test_a_job_that_is_killed_does_not_disturb_another(emulated_fabric: BringUp, tmp_path: Path) -> None:
    network = emulated_fabric("bcube:2x2", "100mbit")
    begun, begun_too, stop = (tmp_path / name for name in ("begun", "begun-too", "stop"))
    script = tmp_path / "other.py"
    script.write_text(OTHER)
    train = adding(begun, stop, after=20)
    with bml.start(train, "bcube:2x2", launcher="processes", emulated=network.name, prints=False) as job:
        wait_for(begun)
        other = subprocess.Popen([sys.executable, str(script), network.name, str(begun_too)])
        try:
            wait_for(begun_too)
        finally:
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
        stop.touch()
        result = job.wait()
    assert len(set(result.values.values())) == 1
    assert len(set(result.report["digests"].values())) == 1
    assert [view["failures"] for view in result.report["views"]] == [[]], "no view but the first"
    assert fabric.find(network.name).status()["failures"] == []


def test_one_jobs_dead_server_is_alive_for_the_other(emulated_fabric: BringUp, tmp_path: Path) -> None:
    network = emulated_fabric("bcube:2x2", "100mbit")
    begun, stop = tmp_path / "begun", tmp_path / "stop"
    train = adding(begun, stop, after=20)
    with bml.start(train, "bcube:2x2", launcher="processes", emulated=network.name, prints=False) as job:
        wait_for(begun)
        (times,) = run(network, [Load(1 << 18, fault="kill:3")], seconds=0.3)
        assert len(times) > 0
        stop.touch()
        result = job.wait()
    assert sorted(result.values) == [0, 1, 2, 3]
    assert [view["failures"] for view in result.report["views"]] == [[]], "no view but the first"


def test_switches_serve_urgent_packets_first_and_let_no_class_stand_still(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2", "50mbit")
    for flows in ([(3, 4, 0)] * 3, [(3, 4, 0), (5, 4, 0), (5, 4, 0)]):  # at a NIC, at a switch's port
        urgent, normal, bulk = goodputs(network, flows, 1.5, [URGENT, NORMAL, BULK])
        whole = RATE_BIT * fabric.GOODPUT
        assert urgent > 0.6 * whole, "0.8 by the setting"
        assert min(normal, bulk) > 0.04 * whole, "0.1 by the setting"
        assert urgent + normal + bulk < 1.05 * whole
    normal, bulk = goodputs(network, [(3, 4, 0)] * 2, 1.5, [NORMAL, BULK])
    assert normal > 0.7 * whole, "0.9 by the setting"


def test_classes_stay_when_a_cable_was_damaged_and_healed(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:2x2", "50mbit")
    network.blackhole(0, 0)
    network.heal(0, 0)
    network.shape("40mbit")
    urgent, normal = goodputs(network, [(0, 1, 0)] * 2, 1.5, [URGENT, NORMAL])
    assert urgent > 3 * normal
    assert urgent + normal < 1.05 * 40_000_000 * fabric.GOODPUT


def test_a_kernel_that_knows_no_classes_has_one_queue(
    emulated_fabric: BringUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(queues.plugins, "nosuch", queues.plugins["htb"])
    monkeypatch.setattr(queues, "_KIND", "nosuch")
    network = fabric.up("switch:2", "50mbit", name=f"q{os.getpid()}", maker=os.getpid())
    try:
        urgent, normal = goodputs(network, [(0, 1, 0)] * 2, 1.0, [URGENT, NORMAL])
    finally:
        network.down()
    assert min(urgent, normal) > 0.2 * RATE_BIT
