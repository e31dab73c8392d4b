"""The proved optimum is that of another programme, written anew: shares of cables, and all partitions.

Trees of total weight w fit into shares x of edges if and only if, however the servers are divided into p
parts, the edges between parts have (p - 1)·w together (Tutte, Nash-Williams, 1961, with real numbers). A NIC
sends and receives once for each edge at it, so the shares there are at most its rate. The largest w is 1 /
GST.
"""

import random
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from sampled import first
from scipy.optimize import linprog

from bml.schedule import gst, plan, prove
from bml.topology import parse

FABRICS = (
    "torus:2x1", "torus:3x1", "torus:5x1", "torus:2x2", "torus:3x2", "bcube:2x2", "bcube:2x3", "bcube:3x2",
    "switch:2", "switch:5", "fattree:4/6",
)  # fmt: skip
MOST = 6
ROUNDS, PER_ROUND = 25, 20


def partitions(servers):
    """All ways to divide servers into parts, as {server: part}."""
    if not servers:
        yield {}
        return
    for rest in partitions(servers[1:]):
        for part in range(max(rest.values(), default=-1) + 2):
            yield {servers[0]: part, **rest}


def least_time(fabric):
    """The least pipelined GST of any trees, in T."""
    cables = [
        ((a, level), (b, level))
        for level, group in fabric.switches
        for a, b in combinations(fabric.attached(level, group), 2)
    ]
    rows, limits = [], []
    for nic in sorted({nic for cable in cables for nic in cable}):
        rows.append([float(nic in cable) for cable in cables] + [0.0])
        limits.append(float(fabric.rate(*nic)))
    for part in partitions(fabric.servers):
        between = [-float(part[a] != part[b]) for (a, _), (b, _) in cables]
        rows.append([*between, float(len(set(part.values())) - 1)])
        limits.append(0.0)
    solved = linprog([*np.zeros(len(cables)), -1.0], A_ub=rows, b_ub=limits, method="highs")
    assert solved.status == 0, solved.message
    return 1 / -solved.fun


def drawn(chance, survivors):
    """A fabric with so many servers left at most, perhaps other parts dead, and links of random rates."""
    while True:
        fabric = parse(chance.choice(FABRICS))
        left = min(survivors, len(fabric.servers))
        dead = [f"server:{each}" for each in chance.sample(fabric.servers, len(fabric.servers) - left)]
        others = [f"link:{server}/{level}" for server, level in fabric.links]
        others += [f"switch:{level}/{group}" for level, group in fabric.switches]
        dead += chance.sample(others, chance.choice((0, 0, 1, 2)))
        slow = chance.sample(fabric.links, chance.randint(0, len(fabric.links)))
        rates = {link: f"{chance.randint(1, 20)}/{chance.randint(5, 10)}" for link in slow}
        made = fabric.with_rates(rates).without(*dead)
        if len(made.servers) > 1 and made.is_connected:
            return made


@pytest.mark.parametrize("number", first(3, range(ROUNDS)))
def test_random_fabrics(number):
    for seed in range(number * PER_ROUND, (number + 1) * PER_ROUND):
        chance = random.Random(seed)
        fabric = drawn(chance, chance.choice((2, 2, 3, 4, 5, MOST)))
        proved = prove(fabric)
        assert proved.kind == "optimum", fabric
        assert float(proved.value) == pytest.approx(least_time(fabric), rel=1e-6), fabric
        packed = plan(fabric, "packed")
        assert packed.gst() >= proved.value, fabric


def test_two_cables_that_are_slow_at_different_ends():
    """A cable is as fast as its slower end: adding the rates of each server up hides that."""
    fabric = parse("torus:2x1").with_rates({(0, 0): "1/10", (1, 1): "1/10"})
    assert least_time(fabric) == pytest.approx(5)
    assert prove(fabric).value == gst(plan(fabric, "packed").forest, fabric) == Fraction(5)
