"""Paths on which some traffic passes and some does not: no server waits for ever, or is lost for it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sampled import first

from bml.sim.mishaps.chaos import FOREVER, Mishap, When
from bml.sim.simulation import Simulation
from bml.sim.world.settings import Settings
from bml.topology import parse

STEPS = 200  # about five virtual seconds
STALL_VIEW = "the data connection between NIC 3/0 and 4/0 stands still though heartbeats pass"


def ran(*mishaps: Mishap, seed: int = 1, fabric: str = "bcube:3x2", steps: int = STEPS) -> Simulation:
    simulation = Simulation(
        parse(fabric), seed, settings=Settings(steps=steps, n_elements=9), mishaps=mishaps
    )
    simulation.run()
    assert all(machine.done for machine in simulation.machines.values())
    return simulation


def failures(simulation: Simulation) -> list[tuple[str, ...]]:
    return [record.view.failures for record in simulation.machines[1].core.views]


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(1, range(2)))
def test_a_stall_is_noticed_named_and_routed_round_and_the_nic_is_used_again(seed: int) -> None:
    simulation = ran(Mishap("stall", (4, 3, 0), When("", 0, 0.2), 2.0), seed=seed)
    assert failures(simulation) == [(), ("link:3/0",), ()]
    _, stalled, healed = (record.view for record in simulation.machines[1].core.views)
    assert stalled.reason == STALL_VIEW
    assert stalled.noticed_s < 1.5
    assert "link:3/0 works again" in healed.reason
    times = sorted(min(at_s) for at_s in simulation.history.commit_at_s.values())
    assert max(after - before for before, after in pairwise(times)) < 1.5


@pytest.mark.slow
def test_it_is_not_healed_by_heartbeats_alone() -> None:
    simulation = ran(Mishap("stall", (4, 3, 0), When("", 0, 0.2), FOREVER), steps=120)
    assert failures(simulation) == [(), ("link:3/0",)]


def test_a_connection_that_cannot_be_made_while_heartbeats_pass_is_a_stall() -> None:
    simulation = ran(Mishap("stall", (4, 3, 0), When("", 0, 0.0), FOREVER), steps=20)
    assert failures(simulation) == [(), ("link:3/0",)]
    assert STALL_VIEW in simulation.machines[1].core.views[1].view.reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deaf", "mute"])
def test_a_nic_that_is_dead_in_one_direction_is_blamed(kind: str) -> None:
    simulation = ran(Mishap(kind, (4, 0), When("", 0, 0.2), 2.0))
    assert failures(simulation) == [(), ("link:4/0",), ()]


@pytest.mark.slow
def test_a_peer_that_is_stopped_is_no_stall() -> None:
    frozen = Mishap("freeze", (4,), When("submit", 40, 0.0), 9.0)
    simulation = Simulation(
        parse("bcube:3x2"), 1, settings=Settings(steps=40, n_elements=9), mishaps=[frozen]
    )
    simulation.run()
    view = simulation.machines[1].core.views[1].view
    assert view.failures == ("server:4",)
    assert "stands still" not in view.reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(1, range(2)))
def test_heartbeats_of_which_most_are_lost_cost_a_nic_at_most(seed: int) -> None:
    simulation = ran(Mishap("lossy", (4, 3, 0), When("", 0, 0.2), 2.5), seed=seed)
    assert {part for view in failures(simulation) for part in view} <= {"link:3/0", "link:4/0"}


@pytest.mark.slow
def test_a_path_that_carries_data_needs_no_heartbeats() -> None:
    assert failures(ran(Mishap("unheard", (4, 3, 0), When("", 0, 0.2), 2.0))) == [()]
