"""Which fabric is best for a price: against trainings of each damaged fabric, counted one by one."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import prod

import pytest

from bml.lab.flows.prices import Prices, parts_of
from bml.lab.flows.training.job import train
from bml.lab.flows.training.layers import Layer
from bml.lab.flows.training.training import Part, Training
from bml.lab.flows.training.wires import Network
from bml.lab.survey.choice import Assumed, Change, Offer, alike, best, changes, offers
from bml.schedule.select.model import DEFAULTS
from bml.topology import Fabric, ServerFailure, parse

pytest.importorskip("numba")

LAYERS = [Layer("first", 40_000, 0.0002, 0.0004), Layer("second", 400_000, 0.0001, 0.0003)]
NETWORK = Network("auto", 1.25e9, 1e-5, None, DEFAULTS)
DEAD = {"server": 0.01, "link": 0.003, "switch": 0.002}
FABRICS = [parse(name) for name in ("bcube:2x2", "switch:4", "torus:4x1", "torus:5x1")]
PRICES = Prices(nic=Fraction(1), port=Fraction(3, 2), cable=Fraction(1, 4))


def assumed(dead: dict[str, float] = DEAD, prices: Prices = PRICES, computing: float = 1.0) -> Assumed:
    return Assumed(Training(LAYERS, 50, [Part(0, FABRICS[0])]), NETWORK, prices, dead, computing)


def price(fabric: Fabric) -> float:
    parts = parts_of(fabric)
    return parts.nics + 1.5 * parts.ports + 0.25 * parts.cables


def iteration_s(fabric: Fabric, rate: float) -> float | None:
    """What the servers that are left take for the work of four; None where they are too few."""
    together = fabric.components()[0]
    if 2 * len(together) <= parse(fabric.name).n_servers:
        return None
    left = fabric.without(*(ServerFailure(each) for each in set(fabric.servers) - set(together)))
    network = Network("auto", rate, NETWORK.delay_s, None, DEFAULTS)
    (view,) = train(Training(LAYERS, 50, [Part(0, left)], sharers=4), network)
    return view.iteration_s


@pytest.fixture(scope="module")
def found() -> list[Offer]:
    return offers(FABRICS, assumed())


@pytest.mark.parametrize("number", range(len(FABRICS)))
def test_an_offer_has_the_times_of_its_damaged_fabrics_and_their_mean(
    found: list[Offer], number: int
) -> None:
    fabric, offer = FABRICS[number], found[number]
    assert offer.rate == pytest.approx(1.25e9 * price(FABRICS[0]) / price(fabric))
    parts = {
        "server": [f"server:{each}" for each in fabric.servers],
        "link": [f"link:{server}/{level}" for server, level in fabric.links],
        "switch": [f"switch:{level}/{group}" for level, group in fabric.switches],
    }
    whole_s = iteration_s(fabric, offer.rate)
    assert whole_s is not None
    assert offer.healthy_s == pytest.approx(whole_s)
    slowest, fastest, weights = [1 / whole_s], [1 / whole_s], [1.0]
    for kind, names in parts.items():
        # Parts that are alike are simulated once: schedules without them differ a little, as packed trees do.
        each = [iteration_s(fabric.without(name), offer.rate) for name in names]
        times = [time for time in each if time is not None]
        assert len(times) in (0, len(names)), "a symmetry maps each on the others"
        if times:
            assert min(times) * 0.999 <= (offer.broken_s[kind] or 0) <= max(times) * 1.001
        else:
            assert offer.broken_s[kind] is None
        slowest += [1 / max(times) if times else 0.0] * len(names)
        fastest += [1 / min(times) if times else 0.0] * len(names)
        weights += [DEAD[kind] / (1 - DEAD[kind])] * len(names)
    least, most = (
        sum(rate * weight for rate, weight in zip(rates, weights, strict=True)) / sum(weights)
        for rates in (slowest, fastest)
    )
    assert 0.999 / most <= (offer.mean_s or 0) <= 1.001 / least
    none_dead = prod((1 - DEAD[kind]) ** len(names) for kind, names in parts.items())
    assert offer.left_out == pytest.approx(1 - none_dead * sum(weights), abs=1e-9)


def test_slow_links_limit_no_share_of_the_time() -> None:
    """A server that computes for long is done in that time, whatever its NIC could carry."""
    slow = parse("graph:0*1/10-1*1/10-2*1/10-3*1/10")
    layers = [Layer("all", 1000, 1.0, 2.0)]
    training = Training(layers, 50, [Part(0, slow)])
    (offer,) = offers([slow], Assumed(training, NETWORK, PRICES, dict.fromkeys(DEAD, 0.0)))
    assert offer.mean_s == pytest.approx(offer.healthy_s)
    assert offer.mean_s == pytest.approx(3.0, rel=0.01)


def test_parts_that_are_hardly_ever_whole_leave_a_mean_or_none() -> None:
    for dead in (0.9, 0.999999, 1 - 1e-12):
        (offer,) = offers(FABRICS[:1], assumed(dict.fromkeys(DEAD, dead)))
        assert offer.mean_s is None or 0.9 * (offer.healthy_s or 0) < offer.mean_s < 10 * (
            offer.healthy_s or 0
        )
        assert best([offer]) in (offer, None)


def test_the_best_has_the_least_time_on_average(found: list[Offer]) -> None:
    first = best(found)
    assert first is not None
    assert first.mean_s == min(each.mean_s for each in found if each.mean_s is not None)
    assert first.fabric not in alike(found, first)
    assert best([Offer("switch:2", 1.0, None, {}, None)]) is None


def test_a_change_decides_where_another_fabric_takes_clearly_less_then() -> None:
    """Free ports make one switch a bargain, dear ones a torus; each change equals a choice with it alone."""
    cheap = Prices(nic=Fraction(1), port=Fraction(1, 2), cable=Fraction(0))
    base = assumed(prices=cheap)
    first = best(offers(FABRICS, base))
    assert first is not None
    told = {(each.what, each.to): each for each in changes(FABRICS, base, first)}
    assert len(told) == 8
    dear = Prices(cheap.nic, 2 * cheap.port, cheap.cable)
    others: dict[tuple[str, str], Callable[[], Assumed]] = {
        ("the price of a switch's port", "2 times"): lambda: assumed(prices=dear),
        ("the time of computation", "0.5 times"): lambda: assumed(prices=cheap, computing=0.5),
        ("failures", "none"): lambda: assumed(dict.fromkeys(DEAD, 0.0), cheap),
    }
    for key, other in others.items():
        then = offers(FABRICS, other())
        now = best(then)
        assert now is not None
        assert told[key].best == now.fabric
        (same,) = (each for each in then if each.fabric == first.fabric)
        assert told[key].less == pytest.approx(1 - (now.mean_s or 0) / (same.mean_s or 1))
    assert not Change("x", "y", "z", 0.009).decides
    assert Change("x", "y", "z", 0.011).decides


def test_without_failures_none_are_changed() -> None:
    base = assumed(dict.fromkeys(DEAD, 0.0))
    first = best(offers(FABRICS[:2], base))
    assert first is not None
    assert first.mean_s == pytest.approx(first.healthy_s)
    assert {each.what for each in changes(FABRICS[:2], base, first)} == {
        "the rate of NICs",
        "the time of computation",
        "the price of a switch's port",
    }
