"""Simulated steps beside closed forms, and how the work grows with the number of servers."""

import random
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from bml.lab.flows.simulate import Conditions, simulate
from bml.schedule import bound, plan
from bml.schedule.select.formulas import formula
from bml.topology import FabricError, UsageError, parse
from bml.topology.fattree import with_seed, without_inner

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

NBYTES, RATE = 64 << 20, 25e6
WHOLE_S = NBYTES / RATE


def step(fabric, algorithm="auto", **settings):
    made = plan(parse(fabric) if isinstance(fabric, str) else fabric, algorithm)
    return simulate(made, Conditions(**{"nbytes": NBYTES, "rate": RATE, **settings}))


@pytest.mark.parametrize(
    "name", ["switch:9", "bcube:3x2", "bcube:4x2", "bcube:2x3", "torus:4x2", "torus:3x2"]
)
@pytest.mark.parametrize("algorithm", ["bml", "hips", "ring", "ring:both", "mesh"])
def test_times_are_those_of_the_closed_forms(name, algorithm):
    if algorithm == "mesh" and not name.startswith("switch"):
        pytest.skip("hops of the mesh follow one another: the next test")
    known = float(formula(parse(name), algorithm))
    assert step(name, algorithm).seconds / WHOLE_S == pytest.approx(known, rel=1e-3)


@pytest.mark.parametrize("name", ["bcube:3x2", "torus:3x2"])
def test_a_pipeline_fills_and_empties(name):
    """What a mesh of several hops takes beyond its closed form is in proportion to a slice."""
    known, piece = float(formula(parse(name), "mesh")), NBYTES / 9
    over = [step(name, "mesh", slice_nbytes=piece / n).seconds / WHOLE_S - known for n in (8, 128)]
    assert 0 < over[1] < over[0] / 8
    assert over[1] < 0.01


def test_a_delay_is_paid_for_every_hop():
    made = step("bcube:4x2", "bml", slice_nbytes=NBYTES, delay_s=0.01, whole=True)
    assert made.seconds == pytest.approx(float(formula(parse("bcube:4x2"), "bml")) * WHOLE_S + 4 * 0.01)


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3", "bcube:5x1"])
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_one_server_stands_for_all(name, delay_s):
    alone, everyone = (step(name, "bml", whole=whole, delay_s=delay_s) for whole in (False, True))
    assert alone.seconds == pytest.approx(everyone.seconds, rel=1e-9)
    assert alone.stands_for * alone.n_transfers == everyone.n_transfers
    assert alone.utilisation.max() == pytest.approx(everyone.utilisation.max())


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3"])
def test_bml_drawn_from_one_server_is_its_forest(name):
    drawn = step(name, "bml", whole=True)
    built = step(name, "hips")  # the same trees, from the forest
    assert drawn.seconds == pytest.approx(built.seconds, rel=1e-9)
    carried = (dict(zip(each.network.name, each.carried, strict=True)) for each in (drawn, built))
    first, second = carried
    assert first == pytest.approx(second)


@pytest.mark.parametrize("seed", range(6))
def test_links_carry_what_the_plan_counts(seed):
    chance = random.Random(seed)
    fabric = parse(chance.choice(["bcube:3x2", "torus:4x2", "fattree:4"]))
    made = plan(
        fabric.without(f"server:{chance.randrange(9)}"), chance.choice(["ring", "mesh", "tree", "packed"])
    )
    load, outcome = made.load(), simulate(made, Conditions(NBYTES, RATE))
    for name, carried in zip(outcome.network.name, outcome.carried, strict=True):
        if name.endswith((" out", " in")):
            server, level = map(int, name.split()[0].split("/"))
            weight = (load.sent if name.endswith("out") else load.received)[server, level]
            assert carried == pytest.approx(NBYTES * int(weight) / load.whole)
    assert outcome.seconds >= float(made.gst()) * WHOLE_S * (1 - 1e-9)
    inner = max(load.inner.values(), default=0) / load.whole
    assert outcome.seconds >= inner * WHOLE_S * (1 - 1e-9)


@pytest.mark.parametrize(
    ("failures", "measured_s"),
    [((), 2.511), (("server:4",), 2.472), (("link:4/0",), 2.905), (("switch:0/1",), 3.087)],
)
def test_times_are_those_of_the_emulated_fabric(failures, measured_s):
    """Steps of 64 MiB on wires of 200 Mbit/s, of docs/explanation/performance.md: within 5 %."""
    found = step(parse("bcube:3x2").without(*failures), rate=200e6 / 8 * 0.954, delay_s=50e-6)
    assert found.seconds == pytest.approx(measured_s, rel=0.05)


@pytest.mark.slow
def test_collisions_in_a_fat_tree_are_a_distribution():
    made = plan(parse("fattree:6/30"), "mesh")
    found = []
    for seed in range(20):
        seeded = replace(made, fabric=with_seed(made.fabric, seed))
        outcome = simulate(seeded, Conditions(NBYTES, RATE, slice_nbytes=NBYTES))
        found.append(outcome.seconds / WHOLE_S / float(made.gst()))
    assert min(found) >= 1 - 1e-9
    assert len(set(found)) > 10
    assert 1.05 < median(found) < 1.6
    ring = simulate(plan(parse("fattree:6"), "ring"), Conditions(NBYTES, RATE)).seconds / WHOLE_S
    assert ring == pytest.approx(float(formula(parse("fattree:6"), "ring")), rel=1e-3)


def test_dead_core_switches_slow_a_fat_tree_down_and_cut_it_at_last():
    healthy = parse("fattree:4")
    times = [
        simulate(plan(without_inner(healthy, dead), "mesh"), Conditions(NBYTES, RATE)).seconds
        for dead in ([], ["core:0"], ["core:0", "core:1"], ["core:0", "core:1", "core:2"])
    ]
    assert times[0] < times[1] < times[2] < times[3]
    everything = without_inner(healthy, [f"core:{at}" for at in range(4)])
    with pytest.raises(FabricError, match="part servers"):
        simulate(plan(everything, "mesh"), Conditions(NBYTES, RATE))
    with pytest.raises(UsageError, match="core switches 0-3"):
        without_inner(healthy, ["core:4"])
    with pytest.raises(UsageError, match="no inner switch of bcube:3x2"):
        without_inner(parse("bcube:3x2"), ["core:0"])


def test_a_slow_nic_is_what_the_bound_says():
    fabric = parse("bcube:3x2").with_rates({(4, 0): "1/10"})
    found = step(fabric).seconds / WHOLE_S
    assert float(bound(fabric)) <= found < 1.05 * float(bound(fabric))


@pytest.mark.slow  # 917,504 transfers
def test_4096_servers_with_a_slow_nic_are_simulated_one_by_one():
    fabric = parse("bcube:8x4").with_rates({(5, 2): "1/2"})
    found = simulate(plan(fabric, "bml"), Conditions(57_500_000, 5e9))
    assert (found.n_transfers, found.stands_for) == (917_504, 1)
    assert found.seconds / (57_500_000 / 5e9) >= float(plan(fabric, "bml").gst()) * (1 - 1e-9)


def test_work_grows_no_faster_than_events():
    """Of groups of four servers, each with rates of its own, so that hardly two things happen at once."""
    per_transfer = []
    for levels in (2, 3):
        fabric, chance = parse(f"bcube:4x{levels}"), random.Random(levels)
        rates = {link: f"{chance.randint(500, 999)}/1000" for link in fabric.links}
        found = simulate(plan(fabric.with_rates(rates), "bml"), Conditions(NBYTES, RATE, slice_nbytes=NBYTES))
        per_transfer.append(found.n_looks / found.n_transfers)
    assert max(per_transfer) < 1.5 * min(per_transfer)


@pytest.mark.slow
def test_what_does_not_fit_into_memory_is_refused():
    with pytest.raises(UsageError, match=r"would take .* GB to simulate"):
        step("bcube:4x2", "ring", nbytes=10**12, slice_nbytes=1000)
    with pytest.raises(UsageError, match=r"would take .* GB to simulate"):
        step("bcube:8x5", "bml", nbytes=10**9, slice_nbytes=8, whole=True)


def test_an_empty_vector_takes_delays_alone():
    found = step("bcube:3x2", "mesh", nbytes=0, delay_s=1.0)
    assert found.seconds == pytest.approx(4.0)
    assert np.all(found.utilisation == 0)
