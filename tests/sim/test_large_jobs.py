"""Jobs of hundreds of servers: the same cores, whose promises must hold, and what each server sends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sampled import first

from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.sim.check import Scenario, run
from bml.sim.mishaps.chaos import Mishap, When
from bml.sim.simulation import Simulation
from bml.sim.world.coordinators import SimulatedCoordinators
from bml.sim.world.settings import Settings
from bml.sim.world.wires import Wires
from bml.topology import parse

HALL_S = (0.0001, 0.0001)


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "seed"), first(1, [("bcube:9x2", seed) for seed in range(12)]))
def test_eighty_one_servers_keep_all_promises(fabric: str, seed: int) -> None:
    scenario = Scenario.of(seed, fabric)
    assert 1 <= len(scenario.mishaps) <= 6
    assert run(scenario).broken is None


@pytest.mark.slow
@pytest.mark.few(0)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fabric", "seed"), [("bcube:4x5", 3)])
def test_a_thousand_servers_keep_all_promises(fabric: str, seed: int) -> None:
    assert run(Scenario.of(seed, fabric)).broken is None


class Counts:
    """What the servers of a job say while one of them computes, and when a view came after its death."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fabric: str, idle_s: float) -> None:
        self.heartbeats: Counter[int] = Counter()
        self.told: Counter[int] = Counter()
        self.posted: Counter[int] = Counter()
        self.asked_at_s = self.installed_at_s = 0.0
        mishaps = [
            Mishap("endless", (5,), When("", 0, 0.0)),
            Mishap("crash", (5,), When("", 0, idle_s)),
        ]
        self._job = Simulation(parse(fabric), 1, Settings(steps=2, delay_s=HALL_S), mishaps, recorded=False)
        self._idle_s = idle_s
        self._watch(monkeypatch, SimulatedCoordinators, "post", self._post)
        self._watch(monkeypatch, SimulatedCoordinators, "tell", self._tell)
        self._watch(monkeypatch, Wires, "heartbeat", self._heartbeat)
        self._job.run()

    @staticmethod
    def _watch(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, look: Any) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            look(*arguments[1:])
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    @property
    def _idles(self) -> bool:
        return self._idle_s - 1 <= self._job.network.now < self._idle_s

    def _heartbeat(self, server: int, *_: int) -> None:
        self.heartbeats[server] += self._idles

    def _tell(self, server: int, message: msg.ToCoordinator) -> None:
        self.told[server] += self._idles
        if self.asked_at_s and isinstance(message, msg.Accepted):
            self.installed_at_s = self._job.network.now

    def _post(self, channel: Any, message: msg.ToServer) -> None:
        self.posted[channel.server] += self._idles
        if isinstance(message, msg.Freeze) and self._job.network.now >= self._idle_s:
            self.asked_at_s = self.asked_at_s or self._job.network.now


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("fabric", ["bcube:9x2", "bcube:16x2"])
def test_a_server_speaks_to_its_neighbours_and_a_view_takes_a_few_round_trips(
    monkeypatch: pytest.MonkeyPatch, fabric: str
) -> None:
    """Of N servers each sends O(neighbours) a second; the coordinator sends nothing while nothing happens.

    A view change is Freeze, Status, Propose, Accepted and Install, however many servers there are.
    """
    counts = Counts(monkeypatch, fabric, idle_s=1.5)
    found = parse(fabric)
    neighbours = sum(len(found.neighbours(0, level)) for level in range(found.levels))
    most = neighbours * (1 / Timeouts.of(0.5).heartbeat_s + 1)
    assert 0 < max(counts.heartbeats.values()) <= most
    assert max(counts.told.values(), default=0) <= 12
    assert sum(counts.posted.values()) == 0
    assert 0 < counts.installed_at_s - counts.asked_at_s <= 0.1
