"""Whole steps packet by packet beside flows, on all fabrics."""

import pytest

from bml.lab.flows.simulate import Conditions
from bml.lab.flows.simulate import simulate as flows
from bml.lab.packets.ports import ports_of
from bml.lab.packets.settings import Settings
from bml.lab.packets.simulate import simulate
from bml.schedule import plan
from bml.topology import parse

pytestmark = pytest.mark.timeout(600)  # the first of them may compile, on a busy machine

RATE = 5e9


def both(name, algorithm, nbytes, **settings):
    made, known = plan(parse(name), algorithm), Settings(**settings)
    there = Conditions(nbytes, RATE, 2 * known.delay_s)
    return simulate(made, Conditions(nbytes, RATE), known), flows(made, there)


@pytest.mark.parametrize(
    ("name", "algorithm"), [("bcube:3x2", "bml"), ("bcube:4x3", "bml"), ("bcube:3x2", "hips")]
)
@pytest.mark.parametrize("dcqcn", [True, False])
def test_hips_on_bcube_takes_what_flows_take(name, algorithm, dcqcn):
    packets, fluid = both(name, algorithm, 40e6, dcqcn=dcqcn)
    assert packets.seconds == pytest.approx(fluid.seconds, rel=0.02)
    assert packets.pauses.sum() == 0


def test_rings_on_torus_take_what_flows_take():
    made = plan(parse("torus:4x2"), "hips")
    known = Settings()
    packets = simulate(made, Conditions(20e6, RATE), known)
    assert packets.seconds == pytest.approx(
        flows(made, Conditions(20e6, RATE, known.delay_s)).seconds, rel=0.02
    )
    assert packets.ports.switch == []
    assert packets.most_queued.max() == 0


def test_all_bytes_of_the_flows_cross_the_links():
    packets, fluid = both("fattree:4", "mesh", 4e6, packet_nbytes=1000)
    by_link = dict(zip(fluid.network.name, fluid.carried, strict=True))
    assert set(by_link) == set(packets.ports.name)
    assert packets.n_crossings == pytest.approx(sum(by_link.values()) / 1000, rel=0.01)


def test_a_mesh_on_a_fat_tree_takes_longer_than_flows_say():
    packets, fluid = both("fattree:4", "mesh", 10e6, dcqcn=False)
    assert packets.seconds > 1.02 * fluid.seconds
    assert packets.pauses.sum() > 100


def test_fewer_pauses_with_rate_control():
    free, controlled = (both("fattree:4", "mesh", 40e6, dcqcn=on)[0] for on in (False, True))
    assert controlled.pauses.sum() < free.pauses.sum() / 2
    assert controlled.n_notified > 0


def test_links_end_where_the_next_begins():
    made = plan(parse("fattree:4"), "mesh")
    outcome = both("fattree:4", "mesh", 1e5)[1]
    ports = ports_of(outcome.network, made.fabric)
    for connection in range(len(ports.path_start) - 1):
        path = ports.path[ports.path_start[connection] : ports.path_start[connection + 1]]
        assert (ports.target[path[:-1]] == ports.source[path[1:]]).all()
        assert (ports.source[path[0]], ports.target[path[-1]]) == (-1, -1)
    assert set(ports.ports) == {4}
    assert len(ports.switch) == 20


def test_events_grow_with_packets():
    few, many = (both("bcube:3x2", "bml", nbytes)[0] for nbytes in (2e6, 20e6))
    assert many.n_crossings == pytest.approx(10 * few.n_crossings, rel=0.02)
    assert many.n_events == pytest.approx(10 * few.n_events, rel=0.05)


def test_a_damaged_fabric_is_simulated():
    made = plan(parse("bcube:3x2").without("server:4"), "packed")
    outcome = simulate(made, Conditions(5e6, RATE), Settings())
    assert outcome.seconds == pytest.approx(flows(made, Conditions(5e6, RATE)).seconds, rel=0.25)


def test_progress_is_told():
    told = []
    simulate(plan(parse("bcube:8x2"), "bml"), Conditions(20e6, RATE), Settings(), progress=told.append)
    assert told == sorted(told)
    assert 0 < told[0] < 1
