"""Whole trainings: closed forms with failures and stragglers, steps as `bml sim` has them, monotony."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bml.errors import FabricError, TooFewServers, UsageError
from bml.lab.flows.simulate import Conditions, simulate
from bml.lab.flows.training import job
from bml.lab.flows.training.iterations import Iterations, Overlap
from bml.lab.flows.training.job import train
from bml.lab.flows.training.layers import Layer, computed_s, spread
from bml.lab.flows.training.networks import NETWORKS
from bml.lab.flows.training.training import DETECT_S, VIEW_S, Part, Training
from bml.lab.flows.training.wires import Network, Wires
from bml.schedule import plan
from bml.schedule.select.formulas import formula
from bml.schedule.select.model import DEFAULTS
from bml.topology import parse

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

RATE = 25e6
NETWORK = Network("auto", RATE, DEFAULTS.alpha_s, None, DEFAULTS)
LAYERS = [
    Layer("a", 20_000, 0.2, 0.4),
    Layer("b", 0, 0.1, 0.1),
    Layer("c", 1_500_000, 0.1, 0.2),
    Layer("d", 700_000, 0.0, 0.1),
]
HEALTHY = parse("bcube:3x2")


def job_of(*parts: Part, layers=LAYERS, iterations=100, **settings) -> Training:
    return Training(layers, iterations, parts or [Part(0, HEALTHY)], **settings)


def gst_s(fabric, nbytes: int, network: Network = NETWORK) -> float:
    """As `bml sim` finds it."""
    made = plan(fabric, network.algorithm, nbytes, network.constants)
    return simulate(made, Conditions(nbytes, network.rate, network.delay_s)).seconds


def all_s(fabric, network: Network = NETWORK) -> float:
    return sum(gst_s(fabric, layer.nbytes, network) for layer in LAYERS if layer.nbytes)


def test_steps_are_those_of_the_simulation_of_one_step():
    for fabric in (HEALTHY, HEALTHY.without("server:4"), parse("torus:3x2"), parse("fattree:4")):
        wires = Wires(fabric, NETWORK)
        assert [wires.seconds(n) for n in (4, 10**5, 10**7)] == [gst_s(fabric, n) for n in (4, 10**5, 10**7)]


@pytest.mark.parametrize("algorithm", ["bml", "ring", "mesh"])
def test_without_overlap_and_delay_a_job_takes_its_closed_form(algorithm):
    fabric, network = parse("switch:9"), replace(NETWORK, algorithm=algorithm, delay_s=0.0)
    layers = spread(NETWORKS["resnet50"](), 0.7)
    (view,) = train(job_of(Part(0, fabric), layers=layers, overlap=Overlap.none), network)
    whole_s = sum(layer.nbytes for layer in layers) / RATE
    wires_s = float(formula(fabric, algorithm)) * whole_s
    assert view.communication_s == pytest.approx(wires_s, rel=1e-3)
    assert view.iteration_s == pytest.approx(0.7 + wires_s, rel=1e-3)
    assert view.seconds == pytest.approx(100 * view.iteration_s)
    assert view.exposed_s == pytest.approx(view.communication_s)
    assert view.algorithms == [algorithm]


def test_a_straggler_holds_all_up_by_its_factor():
    plain, slow, two = (
        train(job_of(overlap=Overlap.none, slow=slow), NETWORK)[0]
        for slow in (None, {3: 1.5}, {3: 1.5, 5: 0.5})
    )
    assert slow.compute_s == pytest.approx(1.5 * plain.compute_s) == pytest.approx(1.5 * computed_s(LAYERS))
    assert slow.iteration_s - plain.iteration_s == pytest.approx(0.5 * plain.compute_s)
    assert two.seconds == slow.seconds


@pytest.mark.parametrize("k", [1, 50, 99])
def test_a_dead_server_leaves_its_work_to_the_others(k):
    damaged = HEALTHY.without("server:4")
    parts = [Part(0, HEALTHY), Part(k, damaged, ("server:4",))]
    before, after = train(job_of(*parts, overlap=Overlap.none, slow={4: 2.0}), NETWORK)
    compute_s = computed_s(LAYERS)
    assert before.seconds == pytest.approx(k * (2 * compute_s + all_s(HEALTHY)))
    lost_s = DETECT_S + VIEW_S
    assert after.seconds == pytest.approx(lost_s + (100 - k) * (9 / 8 * compute_s + all_s(damaged)))
    assert (before.survivors, after.survivors, after.since, after.iterations) == (9, 8, k, 100 - k)
    assert (before.lost_s, after.lost_s, after.failures) == (0.0, pytest.approx(lost_s), ["server:4"])


def test_a_dead_link_costs_no_work():
    damaged = HEALTHY.without("link:4/0")
    parts = [Part(0, HEALTHY), Part(10, damaged, ("link:4/0",))]
    _, after = train(job_of(*parts, overlap=Overlap.none, detect_s=0.63, view_s=0.1), NETWORK)
    assert after.seconds == pytest.approx(0.73 + 90 * (computed_s(LAYERS) + all_s(damaged)))


def test_what_is_to_be_sent_is_sent_in_the_next_view():
    """A gradient that backward has when the failure strikes is sent by the new schedule, under nothing."""
    damaged, layer = HEALTHY.without("server:4"), LAYERS[0]
    parts = [Part(0, HEALTHY), Part(50, damaged, ("server:4",))]
    before, after = train(job_of(*parts, layers=[layer], overlap=Overlap.forward), NETWORK)
    healthy_s, damaged_s = gst_s(HEALTHY, layer.nbytes), gst_s(damaged, layer.nbytes)
    assert healthy_s < damaged_s
    assert before.seconds == pytest.approx(50 * 0.6 + 49 * healthy_s)
    assert after.seconds - after.lost_s == pytest.approx(50 * (0.6 * 9 / 8 + damaged_s) + damaged_s)


@pytest.mark.parametrize("by_need", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_states_that_come_again_need_not_be_played(seed, by_need):
    chance = random.Random(seed)
    layers = [
        Layer(str(at), round(10 ** chance.uniform(3, 6)), chance.random() / 9, chance.random() / 5)
        for at in range(chance.randint(1, 9))
    ]
    asked = job_of(layers=layers, iterations=300, overlap=Overlap.forward, by_need=by_need)
    (view,) = train(asked, NETWORK)
    wires, state = Wires(HEALTHY, NETWORK), Iterations(Overlap.forward, by_need)
    took = [state.iterate(layers, wires) for _ in range(300)]
    assert view.seconds == pytest.approx(sum(took) + state.finish(wires), rel=1e-7)
    assert view.iteration_s == pytest.approx(sum(took[100:]) / 200, rel=0.02)


def test_many_iterations_are_not_played(monkeypatch):
    played = []
    iterate = Iterations.iterate
    monkeypatch.setattr(Iterations, "iterate", lambda *given: played.append(1) or iterate(*given))
    (view,) = train(job_of(iterations=10**9, overlap=Overlap.forward), NETWORK)
    assert len(played) < 100
    assert view.seconds == pytest.approx(1e9 * view.iteration_s)


def test_states_that_never_come_again_end_too(monkeypatch):
    exact = train(job_of(iterations=500, overlap=Overlap.forward), NETWORK)[0]
    monkeypatch.setattr(job, "_MOST_PLAYED", 20)
    fresh = iter(range(10**6))
    monkeypatch.setattr(Iterations, "state", lambda self: (float(next(fresh)),))
    found = train(job_of(iterations=500, overlap=Overlap.forward), NETWORK)[0]
    assert found.seconds == pytest.approx(exact.seconds, rel=1e-3)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_more_trouble_takes_longer(seed):
    """Without forward overlap: slower NICs, a straggler, an earlier failure, longer view changes."""
    chance = random.Random(seed)
    k, overlap = chance.randint(2, 90), chance.choice([Overlap.none, Overlap.backward])
    part = chance.choice(["server:4", "link:4/0", "switch:1/2"])

    def seconds(k=k, network=NETWORK, **settings):
        parts = [Part(0, HEALTHY), Part(k, HEALTHY.without(part), (part,))]
        return sum(view.seconds for view in train(job_of(*parts, overlap=overlap, **settings), network))

    plain = seconds()
    assert plain < seconds(network=replace(NETWORK, rate=RATE / 1.5))
    assert plain < seconds(slow={0: 1 + chance.random()})
    assert plain < seconds(k=k - 1)
    assert plain + 1.0 == pytest.approx(seconds(view_s=VIEW_S + 1.0))


def test_trainings_that_cannot_be_are_refused():
    few = HEALTHY.without(*(f"server:{at}" for at in range(5)))
    with pytest.raises(TooFewServers, match="leaves 4 of 9 servers"):
        train(job_of(Part(0, HEALTHY), Part(5, few, ("server:0",))), NETWORK)
    with pytest.raises(UsageError, match="link:4/0 after 100 iterations never strikes"):
        train(job_of(Part(0, HEALTHY), Part(100, HEALTHY.without("link:4/0"), ("link:4/0",))), NETWORK)
    with pytest.raises(FabricError, match="cannot all reach one another"):
        train(job_of(Part(0, HEALTHY.without("link:4/0", "link:4/1"))), NETWORK)
    with pytest.raises(UsageError, match="made-up"):
        train(job_of(), replace(NETWORK, algorithm="made-up"))
