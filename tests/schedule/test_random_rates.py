"""Plans for links of any rate: never faster than what is proved, whatever the digits of the rates."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from bml.schedule import bound, plan
from bml.schedule.bounds.bound import LOWER_BOUND, OPTIMUM, prove
from bml.topology import Fabric, parse

FABRICS = (
    "bcube:2x2",
    "bcube:3x2",
    "bcube:4x2",
    "bcube:2x3",
    pytest.param("torus:3x2", marks=pytest.mark.slow),
    pytest.param("torus:4x2", marks=pytest.mark.slow),
    "switch:6",
    "fattree:4/4",
)
PLANS = 12


def drawn(chance: random.Random, fabric: Fabric) -> Fabric:
    """A fabric with some links of rates of one to four digits, and perhaps something dead."""
    links = [
        (each, level)
        for each in fabric.servers
        for level in range(fabric.levels)
        if fabric.group(each, level) >= 0
    ]
    rates = {}
    for link in chance.sample(links, chance.randint(1, min(6, len(links)))):
        digits = chance.randint(1, 4)
        rates[link] = f"{chance.randint(1, 10**digits) / 10**digits:.{digits}f}"
    rated = fabric.with_rates(rates)
    if chance.random() < 0.4:
        dead = chance.choice([f"server:{chance.randrange(fabric.n_servers)}", "link:0/0"])
        damaged = rated.without(dead)
        if len(damaged.components()) == 1:
            return damaged
    return rated


def check(name: str, seed: int) -> None:
    fabric = drawn(random.Random(f"{name} {seed}"), parse(name))
    found = plan(fabric)
    assert found.gst() >= bound(fabric), fabric
    assert found.gst_staged() >= found.gst(), fabric


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", FABRICS)
def test_no_plan_is_faster_than_the_bound(name: str) -> None:
    for seed in range(PLANS):
        check(name, seed)


def test_five_rates_of_four_digits() -> None:
    """Their common multiple has more than 64 bits."""
    texts = {(0, 0): "0.8713", (1, 0): "0.9127", (2, 0): "0.9391", (3, 0): "0.8819", (4, 1): "0.97"}
    fabric = parse("bcube:3x2").with_rates(texts)
    least = bound(fabric)
    assert least <= plan(fabric).gst() <= least * Fraction(102, 100)


@pytest.mark.parametrize("name", ["bcube:2x2", "bcube:3x2", "switch:4"])
def test_rates_between_which_the_solver_gives_up(name: str) -> None:
    fabric = parse(name).with_rates({(0, 0): "9" * 29, (1, 0): Fraction(1, 10**29), (2, 0): "0.00000001"})
    proved = prove(fabric)
    assert 0 < proved.value <= plan(fabric).gst()
    assert proved.kind in (OPTIMUM, LOWER_BOUND)
