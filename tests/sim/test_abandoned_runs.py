"""Launcher and coordinator die at once, and all servers are told: they leave, and the newest state is kept.

A server that leaves at a boundary may write a checkpoint there. Random moments and delays, on the clock of
the simulation; the promises of the protocol are checked meanwhile.
"""

from __future__ import annotations

from functools import partial

import pytest

from bml.protocol.server import events as ev
from bml.protocol.timeouts import Timeouts
from bml.sim import FOREVER, Mishap, Simulation, When
from bml.sim.server.machine import Machine
from bml.sim.world.settings import Settings
from bml.topology import parse

FABRICS = ("bcube:2x1", "bcube:2x2", "bcube:3x2", "torus:3x2")
TIMES = Timeouts.of()
NOW = When("", 0, 0.0)
TOLD_S = 0.02
"""Within so much time all servers are told."""
NOTICED_S = 1.0
"""By then a server knows that its neighbour has left or died, and that it needs another view."""


def abandoned(fabric: str, seed: int, *mishaps: Mishap) -> tuple[Simulation, float]:
    """Run a job that is abandoned at a random moment after its first view; returns the time of that too."""
    settings = Settings(steps=100_000, shared_memory=seed % 3 == 2)
    simulation = Simulation(parse(fabric), seed, settings, mishaps, recorded=False)
    network, at_s = simulation.network, [0.0]
    steps = network.random.randint(1, 25)

    def tell(machine: Machine) -> None:
        machine.leave()
        machine.handle(ev.Abandoned())

    def begin() -> None:
        if len(simulation.history.commits) < steps:
            network.after(network.random.uniform(0, 0.01), begin)
            return
        at_s[0] = network.now
        simulation.affected.servers.update(simulation.machines)
        simulation.apply_mishap(Mishap("launcher-freeze", (), NOW, FOREVER))
        simulation.apply_mishap(Mishap("coordinator-crash", (), NOW))
        for machine in simulation.machines.values():
            told = partial(machine.process.run, partial(tell, machine))
            network.after(network.random.uniform(0, TOLD_S), told)

    network.after(0.0, begin)
    simulation.run()
    return simulation, at_s[0]


def bound_s(simulation: Simulation) -> float:
    """Within so much time all are over: a server that lacks a view gives up, then its neighbours lack one."""
    fabric = simulation.fabric
    hops = max(len(fabric.route(a, b)) for a in fabric.servers for b in fabric.servers)
    return TOLD_S + hops * (NOTICED_S + TIMES.longest_answer_s)


def kept_steps(simulation: Simulation) -> list[int]:
    """The steps after which servers left at a boundary."""
    return [each.core.committed for each in simulation.machines.values() if each.user.goes]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("seed", range(4))
def test_all_leave_and_the_newest_state_is_kept(fabric: str, seed: int) -> None:
    simulation, at_s = abandoned(fabric, seed)
    newest = max(machine.core.committed for machine in simulation.machines.values())
    assert newest in kept_steps(simulation)
    assert simulation.network.now - at_s < bound_s(simulation)


@pytest.mark.parametrize("seed", range(6))
def test_none_waits_for_ever_when_a_server_died_just_before(seed: int) -> None:
    """The survivors may be within a step, which no coordinator ends: then none is at a boundary."""
    crash = Mishap("crash", (seed % 4,), When("commit", 5 + 7 * seed, 0.001 * seed))
    simulation, at_s = abandoned("bcube:2x2", seed, crash)
    assert all(machine.over or not machine.process.alive for machine in simulation.machines.values())
    assert simulation.network.now - at_s < bound_s(simulation)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 180))
def test_many_that_leave(seed: int) -> None:
    simulation, at_s = abandoned(FABRICS[seed % len(FABRICS)], seed)
    newest = max(machine.core.committed for machine in simulation.machines.values())
    assert newest in kept_steps(simulation)
    assert simulation.network.now - at_s < bound_s(simulation)
