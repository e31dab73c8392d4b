"""Cables and switches that come back are used again, and a flapping one ever more rarely."""

from __future__ import annotations

import pytest
from sampled import first

from bml.sim.mishaps.chaos import Mishap, When
from bml.sim.simulation import Simulation
from bml.sim.world.settings import Settings
from bml.topology import parse

STEPS = 260  # about six virtual seconds


def views(simulation: Simulation) -> list[tuple[tuple[str, ...], str]]:
    core = simulation.machines[1].core
    return [(record.view.failures, record.view.reason) for record in core.views]


def silent(target: tuple[int, ...], at_s: float, for_s: float, kind: str = "silent") -> Mishap:
    return Mishap(kind, target, When("", 0, at_s), for_s)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(1, range(2)))
def test_a_cable_that_comes_back_is_used_again(seed: int) -> None:
    simulation = Simulation(
        parse("bcube:3x2"),
        seed,
        settings=Settings(steps=STEPS, n_elements=2),
        mishaps=[silent((4, 0), 0.2, 1.5)],
    )
    simulation.run()
    assert [failures for failures, _ in views(simulation)] == [(), ("link:4/0",), ()]
    assert "link:4/0 works again" in views(simulation)[2][1]


@pytest.mark.slow
def test_a_switch_that_comes_back_is_used_again() -> None:
    simulation = Simulation(
        parse("bcube:3x2"),
        1,
        settings=Settings(steps=STEPS, n_elements=2),
        mishaps=[silent((0, 1), 0.2, 1.5, "switch")],
    )
    simulation.run()
    assert [failures for failures, _ in views(simulation)] == [(), ("switch:0/1",), ()]


@pytest.mark.slow
def test_a_cable_that_stays_dead_stays_out() -> None:
    simulation = Simulation(
        parse("bcube:3x2"),
        1,
        settings=Settings(steps=STEPS, n_elements=2),
        mishaps=[silent((4, 0), 0.2, 60.0)],
    )
    simulation.run()
    assert [failures for failures, _ in views(simulation)] == [(), ("link:4/0",)]


@pytest.mark.slow
def test_a_flapping_cable_is_trusted_ever_more_rarely() -> None:
    flaps = [silent((0, 0), 0.2 + 2.5 * count, 0.8) for count in range(5)]
    simulation = Simulation(
        parse("bcube:2x2"), 3, settings=Settings(steps=3 * STEPS, n_elements=2), mishaps=flaps
    )
    simulation.run()
    seen = [failures for failures, _ in views(simulation)]
    # Out, back after one second, out, and then it never stays up for the two seconds it now takes.
    assert seen[:4] == [(), ("link:0/0",), (), ("link:0/0",)]
    assert len(seen) <= 5
    assert dict(simulation.machines[1].core.view.failed)["link:0/0"] == 2  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_cable_that_heals_while_the_coordinator_dies() -> None:
    mishaps = [silent((0, 0), 0.2, 1.5), Mishap("coordinator-crash", (), When("", 0, 2.4))]
    simulation = Simulation(
        parse("bcube:2x2"), 2, settings=Settings(steps=STEPS, n_elements=2), mishaps=mishaps
    )
    simulation.run()
    assert [failures for failures, _ in views(simulation)] == [(), ("link:0/0",), ()]
