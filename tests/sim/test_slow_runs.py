"""Slow NICs and switches: all servers agree to plan round them, and use them again; nobody is lost."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest
from sampled import first

from bml.sim.mishaps.chaos import FOREVER, Mishap, When
from bml.sim.simulation import Simulation
from bml.sim.world.settings import Settings
from bml.topology import parse


def run(fabric: str, *mishaps: Mishap, steps: int = 16, seed: int = 0) -> Simulation:
    settings = Settings(steps=steps, n_elements=6000, slice_nbytes=2048, rate_nbytes_s=250e3)
    simulation = Simulation(parse(fabric), seed, settings, mishaps)
    simulation.run()
    assert all(machine.done for machine in simulation.machines.values() if machine.process.alive)
    return simulation


def slow(*target: int, kind: str = "slow", at_s: float = 0.0, for_s: float = FOREVER) -> Mishap:
    return Mishap(kind, target, When("", 0, at_s), for_s)


def rates(simulation: Simulation, server: int = 1) -> list[dict[tuple[int, int], int]]:
    """The halvings of each view of a server."""
    records = simulation.machines[server].core.views
    return [{(each.server, each.level): each.halvings for each in record.view.rates} for record in records]


def reasons(simulation: Simulation) -> list[str]:
    return [record.view.reason for record in simulation.machines[1].core.views]


def step_s(simulation: Simulation) -> list[float]:
    """How long every step took, in virtual seconds, from the second on."""
    ends = [max(at) for _, at in sorted(simulation.history.commit_at_s.items())]
    return [after - before for before, after in pairwise(ends)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(1, ["slow", "slow-out", "slow-in"]))
def test_a_slow_nic_is_planned_round_and_steps_are_short_again(kind: str) -> None:
    simulation = run("bcube:3x2", slow(4, 0, 20, kind=kind))
    assert len(rates(simulation)) == 2
    assert rates(simulation)[-1] in ({(4, 0): 2}, {(4, 0): 3})
    assert reasons(simulation)[-1].startswith("NIC 4/0 runs at 1/")
    taken_s = step_s(simulation)
    assert median(taken_s[-5:]) < taken_s[0] / 2, "five times as long before: .89 T and .93 T"


@pytest.mark.slow
def test_the_slowest_nic_is_found_though_it_carries_hardly_anything() -> None:
    """Both directions together carry 10 kB a second then; a step takes 8 s over it, and 1 s round it."""
    simulation = run("bcube:2x2", slow(1, 0, 2, at_s=1.0))
    assert rates(simulation)[-1] == {(0, 0): 5}, "or its equal, NIC 1/0"
    assert simulation.network.now < 30.0


def test_a_server_whose_only_nic_is_very_slow_is_not_lost() -> None:
    """A frame takes longer than `detect_s` then, but its segments are acknowledged one by one."""
    simulation = run("switch:3", slow(0, 0, 3, at_s=1.77), steps=6, seed=287)
    assert all(record.view.contributors == (0, 1, 2) for record in simulation.machines[1].core.views)
    assert max(step_s(simulation)) > 2.0, "a frame of 2 KiB takes 0.3 s"


@pytest.mark.slow
def test_a_slow_switch_is_planned_round() -> None:
    simulation = run("bcube:3x2", slow(0, 1, 20, kind="slow-switch"))
    assert {*rates(simulation)[-1]} == {(3, 0), (4, 0), (5, 0)}
    assert "switch 0/1 runs at 1/" in " ".join(reasons(simulation))


@pytest.mark.slow
def test_a_nic_that_degrades_is_planned_round() -> None:
    simulation = run("bcube:3x2", slow(4, 0, 20, kind="degrade"))
    assert {*rates(simulation)[-1]} == {(4, 0)}
    assert rates(simulation)[-1][4, 0] in (2, 3)


@pytest.mark.slow
def test_a_nic_that_degraded_recovers() -> None:
    simulation = run("bcube:2x2", slow(1, 0, 20, kind="degrade", for_s=5.0), steps=60)
    assert {*rates(simulation)[-1].values()} == {0}


@pytest.mark.slow
def test_a_busy_server_makes_steps_long_and_no_view() -> None:
    healthy, busy = (step_s(run("bcube:2x2", *each, steps=10)) for each in ((), (slow(1, 1, kind="busy"),)))
    assert median(busy) > median(healthy)
    assert len(rates(run("bcube:2x2", slow(1, 1, kind="busy")))) == 1


@pytest.mark.slow
def test_jitter_makes_steps_longer_and_loses_nobody() -> None:
    healthy, late = (run("bcube:2x2", *each) for each in ((), (slow(1, 0, 20, kind="jitter"),)))
    assert median(step_s(late)) > median(step_s(healthy))
    assert all(record.view.contributors == (0, 1, 2, 3) for record in late.machines[1].core.views)


@pytest.mark.slow
def test_what_is_fast_again_is_used_again() -> None:
    simulation = run("bcube:2x2", slow(1, 0, 20, for_s=4.0), steps=60)
    found = rates(simulation)
    assert max(found[1].values()) >= 1
    assert {*found[-1].values()} == {0}
    assert reasons(simulation)[-1].endswith("runs at its full rate again")


@pytest.mark.slow
def test_what_is_fast_again_is_used_again_though_servers_come_and_go() -> None:
    """A view comes every 2 s; a round takes 1.5 s from there, and two rounds must find the NIC faster."""
    churn = [
        Mishap(kind, (3,), When("", 0, 4.5 + 4.0 * n + after_s))
        for n in range(5)
        for kind, after_s in (("crash", 0.0), ("join", 2.0))
    ]
    simulation = run("bcube:2x2", slow(1, 0, 20, for_s=4.0), *churn, steps=60)
    assert "NIC 0/0 runs at its full rate again" in reasons(simulation)
    assert {*rates(simulation)[-1].values()} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_wander_makes_no_view(seed: int) -> None:
    assert len(rates(run("bcube:2x2", steps=40, seed=seed))) == 1


def test_a_successor_of_the_coordinator_keeps_the_rates() -> None:
    crash = Mishap("coordinator-crash", (), When("Install", 5, 0.3))
    simulation = run("bcube:2x2", slow(1, 0, 20), crash, steps=24)
    assert simulation.history.counts["takeover"] == 2
    assert all({*found} == {(0, 0)} for found in rates(simulation)[1:]), "or its equal, NIC 1/0"


@pytest.mark.slow
def test_a_coordinator_that_dies_while_rates_are_agreed_on_leaves_one_plan() -> None:
    for point in ("Freeze", "Status", "Propose", "Accepted", "Install"):
        crash = Mishap("coordinator-crash", (), When(point, 6 + 4 * (point == "Status"), 0.0))
        simulation = run("bcube:2x2", slow(1, 0, 20), crash, steps=24)
        assert simulation.history.counts["takeover"] == 2
        assert {*rates(simulation)[-1]} == {(0, 0)}


@pytest.mark.slow
def test_a_joiner_plans_with_the_rates_of_the_others() -> None:
    crash, back = Mishap("crash", (3,), When("Install", 6, 0.5)), Mishap("join", (3,), When("fault", 2, 0.5))
    simulation = run("bcube:2x2", slow(1, 0, 20), crash, back, steps=40)
    machine = simulation.machines[3]
    assert machine.incarnation is not None
    assert machine.done
    assert {*rates(simulation, server=3)[-1]} == {(0, 0)}


@pytest.mark.slow
def test_no_server_asks_its_user_again_when_only_rates_change() -> None:
    """The contributors stay: what is final stays so, unless it is less than half of the step."""
    simulation = run("bcube:2x2", slow(1, 0, 20), steps=24)
    changes = [record.view for record in simulation.machines[1].core.views[1:]]
    assert changes
    retries = simulation.history.counts["retry"]
    assert retries <= 4 * sum(not view.final for view in changes)
