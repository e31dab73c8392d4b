"""The whole protocol on every family, with a crash and a silent NIC: right sums on all survivors."""

import pytest

from bml.sim import Simulation
from topology import parse


def check(history, steps, survivors):
    assert sorted(history.commits) == list(range(1, steps + 1))
    assert sorted(history.commits[steps]) == survivors
    assert not {server: error for server, error in history.errors.items() if server in survivors}


@pytest.mark.parametrize("algorithm", ["auto", "mesh", "ring", "flextree"])
@pytest.mark.parametrize("name", ["torus:3x2", "torus:4x2", "bcube:3x2"])
def test_a_crash_and_a_silent_nic(name, algorithm):
    fabric = parse(name)
    simulation = Simulation(fabric, seed=11, steps=25, algorithm=algorithm)
    simulation.network.at(0.05, lambda: simulation.silence(1, 0))
    simulation.network.at(0.7, lambda: simulation.crash(3))
    check(simulation.run(), 25, [server for server in fabric.servers if server != 3])


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree"])
@pytest.mark.parametrize("name", ["switch:5", "fattree:4/6"])
def test_servers_with_one_nic(name, algorithm):
    fabric = parse(name)
    crash = Simulation(fabric, seed=2, steps=20, algorithm=algorithm)
    crash.network.at(0.03, lambda: crash.crash(3))
    check(crash.run(), 20, [server for server in fabric.servers if server != 3])
    # Whose only NIC is silent is cut off: the others go on without it.
    silent = Simulation(fabric, seed=2, steps=40, algorithm=algorithm)
    silent.network.at(0.03, lambda: silent.silence(1, 0))
    check(silent.run(), 40, [server for server in fabric.servers if server != 1])
