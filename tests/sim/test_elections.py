"""Ranks that elect who runs the coordinator, among deaths of those beside which it runs."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from bml.errors import Evicted
from bml.sim.check import Scenario, run
from bml.sim.mishaps.chaos import FOREVER, OF_LEADERS, Mishap, When
from bml.sim.simulation import Simulation
from bml.sim.world.settings import Settings
from bml.topology import parse
from bml.topology.errors import FabricError

FABRIC = "bcube:3x2"


def at(point: str, nth: int, after_s: float = 0.0) -> When:
    return When(point, nth, after_s)


def simulate(*mishaps: Mishap, fabric: str = FABRIC, steps: int = 8, **settings: object) -> Simulation:
    chosen = Settings(steps=steps, n_elements=17, elects=True, **settings)  # type: ignore[arg-type]
    simulation = Simulation(parse(fabric), seed=1, settings=chosen, mishaps=mishaps)
    simulation.run()
    return simulation


def done(simulation: Simulation) -> list[int]:
    return [server for server, machine in simulation.machines.items() if machine.done]


def hosts(simulation: Simulation) -> list[int | None]:
    """The ranks beside which coordinators ran, in their order."""
    return [each.host for each in simulation.coordinators.started]


def longest_s(simulation: Simulation) -> float:
    """The longest time between two commits of the job, in virtual seconds."""
    times = [min(at_s) for at_s in simulation.history.commit_at_s.values()]
    return max(b - a for a, b in pairwise(times))


def test_rank_0_runs_the_coordinator() -> None:
    simulation = simulate()
    assert hosts(simulation) == [0]
    assert done(simulation) == list(range(9))


@pytest.mark.parametrize("first", ["leader-crash", "leader-machine-freeze"])
@pytest.mark.parametrize("second", ["leader-crash", "leader-machine-freeze"])
@pytest.mark.parametrize("apart_s", [0.0, 0.3, 1.2])
def test_any_two_ranks_with_coordinators_may_be_lost(first: str, second: str, apart_s: float) -> None:
    """Past the first steps, in which silence is tolerated for 10 s."""
    simulation = simulate(
        Mishap(first, (), at("commit", 30)), Mishap(second, (), at("fault", 1, apart_s or 0.0005))
    )
    assert len(done(simulation)) >= 7
    assert longest_s(simulation) < 3


@pytest.mark.parametrize("pair", list(combinations(range(4), 2)))
def test_any_two_of_four_machines_may_be_lost_one_after_the_other(pair: tuple[int, int]) -> None:
    a, b = pair
    simulation = simulate(
        Mishap("machine-freeze", (a,), at("commit", 12)),
        Mishap("crash", (b,), at("commit", 20)),
        fabric="bcube:4x1",
        min_servers=2,
    )
    assert done(simulation) == [server for server in range(4) if server not in pair]
    assert hosts(simulation)[-1] == min({*range(4)} - {*pair})


def test_the_coordinator_goes_on_while_its_rank_is_stopped() -> None:
    simulation = simulate(Mishap("leader-freeze", (), at("commit", 30), 20.0))
    assert hosts(simulation) == [0]
    assert done(simulation) == list(range(1, 9))


def test_a_coordinator_that_is_stopped_alone_is_killed_by_its_rank() -> None:
    """Nobody needs it meanwhile: nothing else tells that it is stopped. The other one has a process ready."""
    simulation = simulate(Mishap("coordinator-freeze", (), at("commit", 30)), fabric="bcube:2x1", steps=700)
    assert simulation.history.counts["kill"] == 1
    assert hosts(simulation) == [0, 1]
    assert done(simulation) == [0, 1]


def test_a_coordinator_that_cannot_be_reached_is_replaced_when_it_is_needed() -> None:
    """Its machine's other network is cut, its rank is heard over all NICs, and no connection breaks."""
    simulation = simulate(
        Mishap("leader-control-hold", (), at("commit", 30)), Mishap("crash", (5,), at("fault", 1))
    )
    assert hosts(simulation)[0] == 0
    assert len(hosts(simulation)) > 1
    assert done(simulation) == [1, 2, 3, 4, 6, 7, 8]
    assert isinstance(simulation.history.errors[0], Evicted | FabricError)


def test_a_job_whose_coordinator_cannot_be_reached_ends_well() -> None:
    """All are done, and none is told: they ask now and then, and the next one ends the job."""
    simulation = simulate(Mishap("leader-control-hold", (), at("commit", 71)))
    assert done(simulation) == list(range(9))
    assert hosts(simulation) == [0, 1]


@pytest.mark.parametrize("pair", [(0, 8), (0, 4), (0, 2)])
def test_ranks_that_do_not_reach_each_other_do_not_depose_each_other_for_ever(pair: tuple[int, int]) -> None:
    """All others reach both: one of the two is out after hold_s, and the others go on."""
    simulation = simulate(
        Mishap("control-pair", pair, at("commit", 30)), Mishap("crash", (5,), at("fault", 1)), steps=20
    )
    assert len(hosts(simulation)) < 6
    assert len(done(simulation)) >= 7
    assert longest_s(simulation) < 40


def test_a_rank_waits_for_no_coordinator_that_has_deposed_its_own_and_died() -> None:
    """Rank 2, which does not reach rank 0, has deposed it when it dies."""
    simulation = simulate(
        Mishap("control-pair", (0, 2), at("commit", 30)),
        Mishap("crash", (5,), at("fault", 1)),
        Mishap("crash", (2,), at("takeover", 2, 1.0)),
        steps=20,
    )
    assert done(simulation) == [0, 1, 3, 4, 6, 7, 8]
    assert longest_s(simulation) < 5


def test_coordinators_that_crash_on_their_start_are_tried_again() -> None:
    simulation = simulate(
        Mishap("coordinator-fails", (4,), When("", 0, 0.0)), Mishap("coordinator-crash", (), at("commit", 30))
    )
    assert done(simulation) == list(range(9))


def test_a_rank_that_was_started_again_is_let_in_once_the_store_answers() -> None:
    simulation = simulate(
        Mishap("leader-crash", (), at("commit", 30)),
        Mishap("store-stall", (), at("fault", 1), 2.0),
        Mishap("join", (0,), at("fault", 1, 0.3)),
        fabric="bcube:2x2",
        steps=500,
    )
    assert done(simulation) == list(range(4))
    joined = simulation.machines[0]
    assert joined.first_step > 8
    assert hosts(simulation) == [0, 1]


def test_a_rank_that_comes_when_all_have_ended_says_so() -> None:
    simulation = simulate(
        Mishap("crash", (5,), at("commit", 60)), Mishap("join", (5,), at("Shutdown", 8, 0.001)), steps=8
    )
    assert done(simulation) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert "all others had ended" in str(simulation.history.errors[5])
    assert simulation.network.now < 5


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [False, True])
def test_seeds_with_elections_hold(shared_memory: bool) -> None:
    seeds = [seed for seed in range(4, 2100, 7) if Scenario.of(seed, None, shared_memory).elects]
    assert len(seeds) > 200
    for seed in seeds:
        assert run(Scenario.of(seed, None, shared_memory)).broken is None, seed


def test_seeds_draw_every_mishap_of_leaders() -> None:
    drawn = {each.kind for seed in range(4, 3000, 7) for each in Scenario.of(seed).mishaps}
    assert drawn >= {*OF_LEADERS, "store-stall", "spare-crash", "coordinator-fails"}
    assert any(each.for_s == FOREVER for seed in range(4, 700, 7) for each in Scenario.of(seed).mishaps)
