"""Exchange: whole vectors round by round, its price, its engine, the same bits on every server."""

import random
import tracemalloc

import numpy as np
import pytest
from sampled import first

from bml.protocol.step.dataflow import Place, Reduce, Stamp
from bml.protocol.step.exchange import ExchangeEngine, engine_for
from bml.protocol.step.workspace import Workspace
from bml.protocol.wire.frame import FrameError, Kind
from bml.schedule import Exchange, ExchangeProgram, Hop, plan, verify_exchange
from bml.schedule.select.model import counts
from bml.sim import Simulation
from bml.sim.world.settings import Settings
from bml.topology import FabricError, UsageError, parse

WORKS = [
    "bcube:3x2",
    "bcube:4x2",
    "bcube:2x3",
    "bcube:5x1",
    "torus:2x2",
    "torus:3x2",
    "switch:5",
    "fattree:4",
]


@pytest.mark.parametrize(
    ("name", "rounds", "pipelined"),
    [("bcube:3x2", 2, 2), ("bcube:4x2", 2, 3), ("bcube:2x3", 3, 1), ("torus:3x2", 2, 1), ("switch:5", 1, 4)],
)
def test_it_takes_k_rounds_and_loads_a_nic_with_n_minus_1_vectors(name, rounds, pipelined):
    made = plan(parse(name), "exchange")
    assert made.violations() == []
    assert made.schedule.n_rounds == rounds
    assert made.gst() == pipelined
    assert made.gst_staged() == rounds * pipelined
    assert made.load().busiest == pipelined


def test_partners_of_a_server():
    program = plan(parse("bcube:3x2"), "exchange").program(4)
    assert program == ExchangeProgram(4, ((Hop(3, 3, 0), Hop(5, 5, 0)), (Hop(1, 1, 1), Hop(7, 7, 1))))


def test_a_slow_link_counts_by_its_rate():
    made = plan(parse("bcube:3x2").with_rates({(4, 0): "0.5"}), "exchange")
    assert (made.gst(), made.gst_staged()) == (4, 6)


@pytest.mark.parametrize(
    ("name", "failures", "says"),
    [
        ("bcube:3x2", ["server:4"], "server 1 never gets the contribution of server 3|never gets"),
        ("bcube:3x2", ["link:4/0"], "servers 3 and 4 must exchange over level 0, where no live link"),
        ("bcube:3x2", ["switch:1/2"], "servers 2 and 5 must exchange over level 1"),
        ("torus:4x2", [], "servers 0 and 2 of one ring are no neighbours"),
    ],
)
def test_where_it_cannot_work_it_says_why(name, failures, says):
    with pytest.raises(FabricError, match=says):
        plan(parse(name).without(*failures), "exchange").gst()


def test_it_works_where_whole_groups_are_dead():
    fabric = parse("bcube:3x2").without("server:0", "server:1", "server:2")
    made = plan(fabric, "exchange")
    assert made.violations() == []
    assert made.gst_staged() == 3
    alone = parse("bcube:2x1").without("server:1")
    assert plan(alone, "exchange").program(0).rounds == ()
    assert plan(alone, "exchange").gst() == 0


@pytest.mark.slow
def test_a_large_one_is_verified_and_one_that_is_too_large_refused_at_once():
    """Servers of one group hold one sum, so 2187 servers need no table of 2187 times 2187 vectors."""
    tracemalloc.start()
    try:
        assert plan(parse("bcube:3x7"), "exchange").violations() == []
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    with pytest.raises(FabricError, match=r"16764930 hops, up to 4194304 are built"):
        plan(parse("switch:4095"), "exchange").violations()


def test_the_verifier_follows_the_sums_of_uneven_groups():
    """Sums that differ, though groups are whole in each round: a vector comes twice, another not at all."""
    fabric = parse("bcube:2x2")
    level = {0: {server: server ^ 1 for server in range(4)}, 1: {server: server ^ 2 for server in range(4)}}
    rounds = {
        server: tuple((Hop(level[at][server], level[at][server], at),) for at in (0, 0, 1))
        for server in range(4)
    }
    found = verify_exchange(Exchange(fabric, rounds), fabric)
    assert found == [f"server {server} adds server 0 more than once" for server in range(4)]


def test_it_is_no_forest():
    with pytest.raises(UsageError, match="exchange is no forest"):
        plan(parse("bcube:3x2"), "exchange").forest  # noqa: B018


def test_the_verifier_sees_what_is_wrong():
    fabric = parse("bcube:3x2")
    made = plan(fabric, "exchange").schedule
    assert "it is for servers" in verify_exchange(made, fabric.without("server:0"))[0]
    assert "are no live neighbours" in verify_exchange(made, fabric.without("link:0/1"))[0]
    twice = Exchange(fabric, {server: rounds * 2 for server, rounds in made.rounds.items()})
    assert "more than once" in verify_exchange(twice, fabric)[0]
    once = Exchange(fabric, {server: rounds[:1] for server, rounds in made.rounds.items()})
    assert "never gets the contribution" in verify_exchange(once, fabric)[0]
    lame = {**made.rounds, 4: (made.rounds[4][0][:1], made.rounds[4][1])}
    assert "do not agree" in verify_exchange(Exchange(fabric, lame), fabric)[0]


def run(fabric, inputs, slices, seed):
    """Run the engines of all servers on one array each; frames of a pair stay in order, pairs do not."""
    made, chance = plan(fabric, "exchange"), random.Random(seed)
    engines, spaces = {}, {}
    for server in fabric.servers:
        engine = engine_for(made.program(server), Stamp(1, 1, 7, 4), len(inputs[server]), slices[server])
        engines[server], spaces[server] = engine, Workspace(inputs[server], engine.scratch_elements, "sum")
    wires = {}

    def carry_out(server, instructions):
        for instruction in instructions:
            if isinstance(instruction, Reduce):
                spaces[server].reduce(instruction)
            else:
                size = instruction.header.stop - instruction.header.start
                # A transport may read it later: it must still be the same then.
                frame = (instruction, spaces[server].view(instruction.place, size))
                wires.setdefault((server, instruction.peer), []).append(frame)

    for server in chance.sample(fabric.servers, len(fabric.servers)):
        carry_out(server, engines[server].start())
    while wires:
        pair = chance.choice(sorted(wires))
        sent, payload = wires[pair].pop(0)
        if not wires[pair]:
            del wires[pair]
        head, to = sent.header, engines[pair[1]]
        place = to.place(head.kind, head.origin, head.dest, head.start, head.stop)
        spaces[pair[1]].view(place, head.stop - head.start)[:] = payload
        carry_out(pair[1], to.received(head.kind, head.origin, head.dest, head.start, head.stop))
    assert all(engine.complete and engine.progress == 1.0 for engine in engines.values())
    return [spaces[server].result for server in fabric.servers]


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("n_elements", [0, 1, 50])
def test_everybody_holds_the_same_bits_of_floats(name, n_elements):
    fabric = parse(name)
    rng = np.random.default_rng(5)
    inputs = {
        server: (rng.standard_normal(n_elements) * 10.0 ** rng.integers(-6, 7)).astype("float32")
        for server in fabric.servers
    }
    slices = {server: 1 + server % 7 * 3 for server in fabric.servers}
    results = run(fabric, inputs, slices, seed=n_elements)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    expected = np.sum([one.astype("float64") for one in inputs.values()], axis=0)
    scale = np.sum([np.abs(one) for one in inputs.values()], axis=0)
    assert np.all(np.abs(results[0] - expected) <= 1e-5 * scale)


def test_arrival_order_does_not_change_the_bits():
    fabric = parse("bcube:3x2")
    rng = np.random.default_rng(1)
    inputs = {server: rng.standard_normal(20).astype("float32") for server in fabric.servers}
    results = [run(fabric, inputs, dict.fromkeys(fabric.servers, 4), seed)[0].tobytes() for seed in range(10)]
    assert len(set(results)) == 1


def test_frames_that_do_not_belong():
    engine = ExchangeEngine(plan(parse("bcube:3x2"), "exchange").program(0), Stamp(1, 1, 7, 4), 10, 4)
    assert isinstance(engine.place(Kind.REDUCE, 1, 0, 4, 8), Place)
    for kind, origin, dest, stop in (
        (Kind.BROADCAST, 1, 0, 8),
        (Kind.REDUCE, 4, 0, 8),
        (Kind.REDUCE, 1, 2, 8),
        (Kind.REDUCE, 1, 0, 11),
    ):
        with pytest.raises(FrameError, match="belongs here"):
            engine.place(kind, origin, dest, 4, stop)


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3", "torus:3x2", "switch:5"])
def test_the_protocol_commits_right_sums(name):
    history = Simulation(parse(name), seed=3, settings=Settings(steps=3, algorithm="exchange")).run()
    assert sorted(history.commits) == [1, 2, 3]
    assert all(len(commits) == parse(name).n_servers for commits in history.commits.values())


@pytest.mark.parametrize("name", WORKS)
def test_one_server_tells_of_all_on_a_healthy_fabric(name):
    fabric = parse(name)
    made = plan(fabric, "exchange")
    assert made.violations() == []
    assert made.counts() == counts(made.schedule, fabric)
    assert all(made.program(server) == made.schedule.program(server) for server in fabric.servers)


@pytest.mark.parametrize(("name", "n_servers"), first(1, [("bcube:5x4", 625), ("bcube:8x4", 4096)]))
def test_thousands_of_servers_are_cheap(name, n_servers):
    made = plan(parse(name), nbytes=1024)
    assert made.algorithm == "exchange"
    ports = made.fabric.ports
    assert [len(partners) for partners in made.program(n_servers - 1).rounds] == [ports - 1] * 4
