"""Named histories in which servers come, go and come again, on the clock of the simulation."""

from __future__ import annotations

import itertools

import pytest

from bml.sim import Mishap, Simulation, When
from bml.sim.world.delays import Delays
from bml.sim.world.settings import Settings
from bml.topology import parse

STEPS = 40


def at(point: str, nth: int = 1, after_s: float = 0.0) -> When:
    return When(point, nth, after_s)


def simulate(fabric: str, *mishaps: Mishap, absent: tuple[int, ...] = (), steps: int = STEPS) -> Simulation:
    simulation = Simulation(
        parse(fabric), seed=2, settings=Settings(steps=steps, n_elements=17, absent=absent), mishaps=mishaps
    )
    simulation.run()
    return simulation


def last(simulation: Simulation, step: int = STEPS) -> tuple[int, ...]:
    """The contributors of a step."""
    (found,) = set(simulation.history.commits[step].values())
    return found


def gaps_s(simulation: Simulation) -> list[float]:
    """Between the first commits of all steps."""
    commits = [min(times) for _, times in sorted(simulation.history.commit_at_s.items())]
    return [b - a for a, b in itertools.pairwise(commits)]


GONE = Mishap("crash", (1,), at("submit", 9))
BACK = Mishap("join", (1,), at("fault", 1, 0.08))


@pytest.mark.few(1)
@pytest.mark.parametrize("fabric", ["bcube:2x2", "bcube:3x1", "bcube:3x2", "bcube:2x3"])
def test_a_server_that_died_contributes_again(fabric: str) -> None:
    simulation = simulate(fabric, GONE, BACK)
    assert last(simulation) == parse(fabric).servers
    assert simulation.machines[1].done
    assert simulation.machines[1].first_step > 3
    assert simulation.history.counts["state"] == 1


@pytest.mark.slow
def test_survivors_go_on_while_the_state_moves() -> None:
    simulation = simulate("bcube:3x2", GONE, BACK)
    followed = simulation.machines[1].first_step - 1
    assert simulation.history.counts["keep"] >= 1
    assert last(simulation, followed) == (0, 2, 3, 4, 5, 6, 7, 8)
    assert max(gaps_s(simulation)) < 0.1


@pytest.mark.slow
def test_a_server_that_was_absent_grows_the_job() -> None:
    simulation = simulate("bcube:3x2", Mishap("join", (8,), at("commit", 20)), absent=(8,))
    assert last(simulation, 1) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert last(simulation) == parse("bcube:3x2").servers


@pytest.mark.slow
def test_two_servers_join_at_once() -> None:
    simulation = simulate(
        "bcube:3x2",
        Mishap("join", (8,), at("commit", 20)),
        Mishap("join", (7,), at("commit", 21)),
        absent=(7, 8),
    )
    assert last(simulation) == parse("bcube:3x2").servers


@pytest.mark.few(1)
@pytest.mark.parametrize("fabric", ["bcube:4x1", "switch:4"])
def test_the_state_overtakes_a_token_of_another_learner(fabric: str) -> None:
    simulation = Simulation(
        parse(fabric),
        seed=2,
        settings=Settings(steps=STEPS, n_elements=17, absent=(2, 3), delays=Delays(links={(2, 3, 0): 0.05})),
        mishaps=(Mishap("join", (2,), at("commit", 20)), Mishap("join", (3,), at("commit", 20))),
    )
    simulation.run()
    assert last(simulation) == (0, 1, 2, 3)
    assert simulation.history.counts["state"] == 2


@pytest.mark.slow
def test_a_donor_dies_while_it_gives() -> None:
    simulation = simulate("bcube:3x2", GONE, BACK, Mishap("crash", (4,), at("piece", 2)))
    assert last(simulation) == (0, 1, 2, 3, 5, 6, 7, 8)
    assert simulation.machines[1].done


@pytest.mark.slow
def test_a_joiner_dies_while_it_gets_the_state_and_comes_a_third_time() -> None:
    again = Mishap("join", (1,), at("fault", 3, 0.08))
    simulation = simulate("bcube:3x2", GONE, BACK, Mishap("crash", (1,), at("piece", 2)), again)
    assert last(simulation) == parse("bcube:3x2").servers
    incarnation = simulation.machines[1].incarnation
    assert incarnation is not None
    assert incarnation.number == 2


@pytest.mark.slow
@pytest.mark.parametrize("point", ["Propose", "Install", "piece", "CaughtUp"])
def test_the_coordinator_dies_while_a_server_joins(point: str) -> None:
    nth = 1 if point in ("piece", "CaughtUp") else 9 + 8 + 4  # start, death, then the joining view
    simulation = simulate("bcube:3x2", GONE, BACK, Mishap("coordinator-crash", (), at(point, nth)))
    assert len(simulation.coordinators.started) == 2
    assert last(simulation) == parse("bcube:3x2").servers


@pytest.mark.slow
def test_a_server_that_leaves_costs_no_step_and_no_time_to_notice() -> None:
    simulation = simulate("bcube:3x2", Mishap("leave", (4,), at("submit", 30)))
    assert last(simulation) == (0, 1, 2, 3, 5, 6, 7, 8)
    assert max(gaps_s(simulation)) < 0.06
    assert "leaves" in str(simulation.history.errors[4])


@pytest.mark.slow
def test_a_zombie_that_was_evicted_joins_in_another_incarnation() -> None:
    frozen = Mishap("freeze", (1,), at("submit", 9), 1.0)
    simulation = simulate("bcube:3x2", frozen, Mishap("join", (1,), at("fault", 1, 1.02)), steps=200)
    assert last(simulation, 200) == parse("bcube:3x2").servers
