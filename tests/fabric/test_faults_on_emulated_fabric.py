"""Faults of real cables, applied when a server reports them due, and noticed by the NIC's own carrier."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml import fabric
from bml.cluster.server.carrier import CarrierWatch
from bml.fabric import EmulatedFabric, namespace
from bml.io.poller import Poller
from bml.pytest_plugin import BringUp

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

SLOW = {"detect_s": 60.0}
AT_ONCE_S = 30.0
"""Silence tells after 6 s: what is known sooner was noticed by other means, however busy the machine is."""


def run(network: EmulatedFabric, *faults: str, epochs: int = 16, **settings: Any) -> bml.Result:
    def train(session: bml.Session) -> dict[str, Any]:
        return jobs.descend(session, epochs=epochs)

    where = {"launcher": "processes", "emulated": network.name, "prints": False}
    result = bml.launch(train, network.fabric.name, faults=faults, **where, **settings)
    assert network.status()["failures"] == [], "what the job broke is healed"
    assert result.report["steps"] == 5 * epochs
    assert len(set(result.report["digests"].values())) == 1
    assert result.report["samples"]["complete"]
    np.testing.assert_allclose(result.value["params"], jobs.reference(epochs), rtol=1e-3, atol=1e-5)
    return result


@pytest.mark.parametrize(
    "fault",
    [
        "cut:4/0@step=20",
        "blackhole:4/1@step=20,phase=reduce",
        "switch:1/2@step=20",
    ],
)
def test_a_fault_by_step_strikes_in_that_step(emulated_fabric: BringUp, fault: str) -> None:
    """Steps take about a millisecond: a fault that only follows the job's reports comes far too late."""
    # The server stands still for up to half of detect_s, until the cable is broken.
    network = emulated_fabric("bcube:3x2", "100mbit")
    view = run(network, fault, algorithm="bml", detect_s=12.0).report["views"][1]
    assert view["commit"] in (19, 20), view


@pytest.mark.parametrize("shape", ["bcube:3x2", "bcube:2x2"])
def test_a_real_cut_is_noticed_at_once_and_by_the_right_nic(emulated_fabric: BringUp, shape: str) -> None:
    view = run(emulated_fabric(shape, "100mbit"), "cut:1/0@step=20", **SLOW).report["views"][1]
    assert view["failures"] == ["link:1/0"], "also where the switch has two ports only"
    assert "its own server says: NIC 1/0 (b0) has no carrier" in view["reason"]
    assert view["noticed_s"] < AT_ONCE_S


def test_a_dead_switch_takes_its_nics_and_no_others(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2", "100mbit")
    result = run(network, "switch:0/1@step=20", **SLOW)
    # All its NICs say so, together as a rule: then it is one failure. On a loaded machine one of them may be
    # a view earlier or later; then its link is named, too.
    seen = network.fabric.without(*result.report["views"][-1]["failures"])
    np.testing.assert_array_equal(seen.nics, network.fabric.without("switch:0/1").nics)
    assert result.report["views"][1]["noticed_s"] < AT_ONCE_S


def test_a_node_dies_with_all_its_processes(emulated_fabric: BringUp) -> None:
    result = run(emulated_fabric("bcube:3x2", "100mbit"), "node:4@step=20", **SLOW)
    died = result.report["views"][1]
    assert died["failures"] == ["server:4"]
    assert died["commit"] in (19, 20)
    assert died["noticed_s"] < AT_ONCE_S
    assert result.dead[4] == "its process was killed by signal 9"


def test_a_connection_that_stands_still_is_noticed_on_cables_too(emulated_fabric: BringUp) -> None:
    result = run(emulated_fabric("bcube:3x2", "100mbit"), "stall:4/0,peer=3@step=20", detect_s=2.0)
    stalled = result.report["views"][1]
    assert stalled["failures"] == ["link:3/0"]
    assert "stands still though heartbeats pass" in stalled["reason"]
    assert len(result.values) == 9


SLOW_CABLE, LOSSY_CABLE = "slow:4/1@step=10,rate=2mbit,for=500ms", "loss:2/0@step=10,share=5%,for=500ms"


@pytest.mark.parametrize(
    "faults", [[SLOW_CABLE], [LOSSY_CABLE], [SLOW_CABLE, LOSSY_CABLE]], ids=["slow", "lossy", "both"]
)
def test_slow_and_lossy_cables_change_no_view(emulated_fabric: BringUp, faults: list[str]) -> None:
    network = emulated_fabric("bcube:3x2", "100mbit")
    assert len(run(network, *faults).report["views"]) == 1


@pytest.mark.usefixtures("emulated_fabric")
def test_a_fabric_that_is_damaged_meanwhile_costs_no_result() -> None:
    """The name of a namespace is removed: servers inside work on, but no cable can be broken or healed."""
    network = fabric.up("bcube:2x1", "100mbit", name=f"d{os.getpid()}")

    def train(session: bml.Session) -> int:
        for step in session.steps(40):
            if step == 10 and session.server == 0:
                namespace.remove(network.namespace(1))
            session.allreduce(np.ones(10))
        return session.server

    faults = ["slow:0/0@step=2,rate=2mbit", "slow:1/0@step=30,rate=2mbit", "node:1@step=35"]
    try:
        result = bml.launch(
            train, "bcube:2x1", faults=faults, launcher="processes", emulated=network.name, **SLOW
        )
    finally:
        network.down()
    assert result.values == {0: 0, 1: 1}
    assert list(result.never_struck) == faults[1:]
    assert all(why.startswith("it could not be injected: ") for why in result.never_struck.values())


def test_faults_into_a_running_job(emulated_fabric: BringUp, tmp_path: Path) -> None:
    network, stop = emulated_fabric("bcube:3x2", "100mbit"), tmp_path / "stop"

    def train(session: bml.Session) -> None:
        while not session.allreduce(np.array([stop.exists()]).astype(np.int32), op="max")[0]:
            pass

    with bml.start(train, "bcube:3x2", launcher="processes", emulated=network.name) as job:
        assert job.inject("cut:4/0")["done"][0].endswith("has it done to the cables of link:4/0")
        deadline = time.monotonic() + 60
        while (now := job.status())["epoch"] < 2:
            assert time.monotonic() < deadline
        assert now["failures"] == ["link:4/0"]
        while "nics" not in (server := job.status()["servers"][4]):  # it has a second to answer
            assert time.monotonic() < deadline
        assert [nic["carrier"] for nic in server["nics"]] == [False, True]
        assert network.status()["failures"] == ["cut:4/0"]
        stop.touch()
        job.wait()


def test_carriers_are_watched_and_loopback_is_not(emulated_fabric: BringUp) -> None:
    network = emulated_fabric("bcube:3x2")
    network.cut(4, 1)
    seen: list[tuple[int, bool, str]] = []
    poller = Poller()

    def watch() -> CarrierWatch:
        nics = (*network.layout.nics(4), "127.0.0.1")
        return CarrierWatch(4, nics, poller, lambda *news: seen.append(news))

    watched = namespace.inside(network.namespace(4), watch)

    def until(condition: Any) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            poller.poll(0.05)

    until(lambda: seen)
    assert seen == [(1, False, "NIC 4/1 (b1) has no carrier")], "what is dead at the start is told"
    assert watched.watched == {0: True, 1: False}
    network.cut(4, 0)
    until(lambda: len(seen) == 2)
    assert seen[1] == (0, False, "NIC 4/0 (b0) has no carrier")
    network.heal(4, 0)
    until(lambda: len(seen) == 3)
    assert seen[2] == (0, True, "NIC 4/0 (b0) has a carrier again")
    watched.close()
    poller.close()


def test_where_there_is_no_netlink_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.AF_NETLINK")
    poller = Poller()
    watched = CarrierWatch(0, ("127.0.0.1",), poller, lambda *news: None)
    assert watched.watched == {}
    watched.close()
    poller.close()
