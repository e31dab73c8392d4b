"""The whole protocol on every family, with a crash and a silent NIC: right sums on all survivors."""

from itertools import product

import pytest
from every_algorithm import SIMULATED
from sampled import chosen

from bml.sim import Mishap, Simulation, When
from bml.sim.world.settings import Settings
from bml.topology import parse


def run(name, algorithm, steps, *mishaps):
    """Run a job in which mishaps (kind, target, seconds from the start) happen."""
    planned = [Mishap(kind, target, When("", 0, after_s)) for kind, target, after_s in mishaps]
    return Simulation(
        parse(name), seed=11, settings=Settings(steps=steps, algorithm=algorithm), mishaps=planned
    ).run()


def check(history, steps, survivors):
    assert sorted(history.commits) == list(range(1, steps + 1))
    assert sorted(history.commits[steps]) == survivors
    assert not {server: error for server, error in history.errors.items() if server in survivors}


def without(name, server):
    return [other for other in parse(name).servers if other != server]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm"),
    chosen(
        lambda name, algorithm: name == "torus:3x2" or algorithm == "auto",
        [
            *product(("torus:3x2", "bcube:3x2"), SIMULATED),
            *product(("torus:4x2",), ("auto", "mesh", "ring", "flextree")),
            *product(("graph:0-1-2,3-4-5,1-3,2-4,0-5,1-4",), ("auto", "packed", "mesh", "ring", "hips")),
        ],
    ),
)
def test_a_crash_and_a_silent_nic(name, algorithm):
    history = run(name, algorithm, 24, ("silent", (1, 0), 0.05), ("crash", (3,), 0.7))
    check(history, 24, without(name, 3))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree"])
@pytest.mark.parametrize("name", ["switch:5", "fattree:4/6"])
def test_servers_with_one_nic(name, algorithm):
    check(run(name, algorithm, 30, ("crash", (3,), 0.03)), 30, without(name, 3))
    # Whose only NIC is silent is cut off: the others go on without it.
    check(run(name, algorithm, 40, ("silent", (1, 0), 0.03)), 40, without(name, 1))


@pytest.mark.slow
def test_an_exchange_that_a_crash_makes_impossible_is_replaced():
    check(run("bcube:3x2", "exchange", 20, ("crash", (4,), 0.05)), 20, without("bcube:3x2", 4))
    # The rest of one switch is one switch.
    check(run("switch:5", "exchange", 20, ("crash", (4,), 0.05)), 20, without("switch:5", 4))
