"""The dataflow of one step: every schedule, any cut, any order of arrival, the same bits."""

import random

import numpy as np
import pytest
from engine_world import World, cases, kind_of, programs
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import one_of_each

from bml.protocol.step.dataflow import Buffer, Place, Reduce, Send, Stamp
from bml.protocol.step.engine import Engine
from bml.protocol.step.exchange import Engines
from bml.protocol.wire.frame import FrameError, Kind
from bml.schedule import Programs, Schedules, plan
from bml.topology import Fabric, parse

CASES = cases()
SAMPLED = one_of_each(kind_of, CASES)
NAMES = [f"{fabric} by {algorithm}" for fabric, algorithm in CASES]
LENGTHS = (0, 1, 2, 5, 17, 41, 130)


def integers(fabric: Fabric, n: int, seed: int) -> dict[int, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {server: chance.integers(-(2**40), 2**40, n) for server in fabric.servers}


def floats(fabric: Fabric, n: int, seed: int) -> dict[int, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {server: chance.standard_normal(n).astype(np.float32) for server in fabric.servers}


@pytest.mark.parametrize(("fabric", "algorithm"), SAMPLED, ids=NAMES)
def test_every_server_ends_with_the_sum(fabric: Fabric, algorithm: str) -> None:
    made = programs(fabric, algorithm)
    for n in LENGTHS:
        inputs = integers(fabric, n, n)
        kept = {server: vector.copy() for server, vector in inputs.items()}
        world = World(made, inputs, random.Random(n))
        for server, result in world.run().items():
            assert np.array_equal(result, sum(inputs.values())), f"server {server}, {n} elements"
            engine = world.nodes[server].engine
            assert engine.complete
            assert engine.progress == 1.0
            assert engine.handled == engine.expected
            assert np.array_equal(inputs[server], kept[server]), "an input was written"


@pytest.mark.few(10)
@pytest.mark.parametrize(("fabric", "algorithm"), SAMPLED, ids=NAMES)
def test_float_sums_have_the_same_bits_whatever_the_order_and_the_cut(fabric: Fabric, algorithm: str) -> None:
    made, inputs = programs(fabric, algorithm), floats(fabric, 53, 5)
    results = {
        result.tobytes()
        for seed in range(4)
        for result in World(made, inputs, random.Random(seed)).run().values()
    }
    assert len(results) == 1


def test_another_order_of_addition_would_show() -> None:
    """The test above can fail: these floats have other bits when they are added in another order."""
    vectors = list(floats(parse("bcube:3x2"), 53, 5).values())
    assert np.sum(vectors, axis=0).tobytes() != sum(vectors[::-1]).tobytes()


@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_every_operation(op: str) -> None:
    fabric = parse("bcube:3x2").without("server:4", "link:0/1")
    inputs = integers(fabric, 30, 1)
    ufunc = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    for result in World(programs(fabric, "auto"), inputs, random.Random(0), op).run().values():
        assert np.array_equal(result, ufunc.reduce(list(inputs.values())))


@pytest.mark.parametrize("dtype", ["int8", "int32", "float16", "float64", "complex64"])
def test_every_kind_of_number(dtype: str) -> None:
    fabric = parse("bcube:2x2")
    inputs = {server: np.arange(11).astype(dtype) for server in fabric.servers}
    for result in World(programs(fabric, "auto"), inputs, random.Random(0)).run().values():
        assert result.dtype == dtype
        assert np.array_equal(result, 4 * np.arange(11).astype(dtype))


def test_nan_and_infinity_pass_through() -> None:
    fabric = parse("bcube:2x2")
    inputs = {server: np.zeros(4) for server in fabric.servers}
    inputs[2][1], inputs[3][2] = np.nan, np.inf
    for result in World(programs(fabric, "auto"), inputs, random.Random(0)).run().values():
        assert np.isnan(result[1])
        assert result[2] == np.inf
        assert not result[[0, 3]].any()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 200), st.integers(0, 10**9))
def test_any_length_cut_and_order(case: tuple[Fabric, str], n: int, seed: int) -> None:
    fabric, algorithm = case
    inputs = integers(fabric, n, seed)
    for result in World(programs(fabric, algorithm), inputs, random.Random(seed)).run().values():
        assert np.array_equal(result, sum(inputs.values()))


def test_the_engine_of_one_server_has_nothing_to_do() -> None:
    fabric = parse("bcube:2x1").without("server:0")
    engine = Engine(plan(fabric).program(1), Stamp(1, 1, 0, 8), 5, 2)
    reduces = list(engine.start())
    assert engine.complete
    assert all(isinstance(one, Reduce) and one.terms == (Place(Buffer.IN, one.start),) for one in reduces)


# --- frames that do not belong ---------------------------------------------------------------------


def expected_frames(server: int, fabric: Fabric, n: int) -> list[Send]:
    """Everything that others will send to `server`, whole ranges at a time."""
    world = World(programs(fabric, "auto"), integers(fabric, n, 0), random.Random(1))
    found = []
    while world.bag:
        found += [send for _, send, _ in world.bag if send.peer == server]
        world.deliver_one()
    return found


@pytest.mark.parametrize("damage", [(), ("server:4",), ("link:0/0",)])
def test_frames_that_do_not_belong_are_refused(damage: tuple[str, ...]) -> None:
    fabric, n = parse("bcube:3x2").without(*damage), 90
    good = {(s.header.kind, s.header.origin, s.header.dest) for s in expected_frames(1, fabric, n)}
    engine = Engine(plan(fabric).program(1), Stamp(1, 1, 0, 8), n, 4)
    chance, refused = random.Random(3), 0
    for _ in range(3000):
        kind, origin, dest = (
            chance.choice([Kind.REDUCE, Kind.BROADCAST]),
            chance.randrange(10),
            chance.randrange(10),
        )
        start = chance.randrange(n)
        stop = chance.randrange(start + 1, n + 9)
        try:
            place = engine.place(kind, origin, dest, start, stop)
        except FrameError:
            refused += 1
        else:
            assert (kind, origin, dest) in good
            limit = engine.scratch_elements if place.buffer is Buffer.SCRATCH else n
            assert place.offset + stop - start <= limit, "the payload would not fit into its buffer"
    assert refused > 2000


def test_a_result_beyond_the_end_of_the_vector_is_refused() -> None:
    engine = Engine(plan(parse("bcube:2x1")).program(0), Stamp(1, 1, 0, 8), 10, 4)
    peer_piece = (5, 10)
    assert engine.place(Kind.BROADCAST, 1, 0, *peer_piece) == Place(Buffer.OUT, 5)
    for start, stop in ((5, 11), (10, 12), (0, 10)):
        with pytest.raises(FrameError):
            engine.place(Kind.BROADCAST, 1, 0, start, stop)


def test_partial_sums_of_one_child_wait_where_their_sum_will_be() -> None:
    engine = Engine(plan(parse("bcube:2x1")).program(0), Stamp(1, 1, 0, 8), 10, 4)
    assert engine.scratch_elements == 0
    assert engine.place(Kind.REDUCE, 1, 0, 0, 5) == Place(Buffer.OUT, 0)
    assert engine.place(Kind.REDUCE, 1, 0, 2, 4) == Place(Buffer.OUT, 2)
    for start, stop in ((0, 6), (5, 10), (4, 4 + 9)):
        with pytest.raises(FrameError):
            engine.place(Kind.REDUCE, 1, 0, start, stop)


def test_terms_are_added_in_address_order() -> None:
    fabric = parse("bcube:3x1")
    world = World(programs(fabric, "auto"), integers(fabric, 30, 0), random.Random(0))
    terms: list[int] = []
    for server, node in world.nodes.items():
        original = node.workspace.reduce

        def spy(one: Reduce, server: int = server, original=original) -> None:
            own = [place.buffer for place in one.terms].index(Buffer.IN)
            terms.append(own - server)
            original(one)

        node.workspace.reduce = spy
    world.run()
    assert terms
    assert set(terms) == {0}, "the own term must stand where the server's number puts it"


# --- priorities --------------------------------------------------------------------------------------


def test_earlier_slices_go_first_and_results_before_partial_sums() -> None:
    fabric = parse("bcube:3x2")
    engine = Engine(plan(fabric).program(0), Stamp(1, 1, 0, 8), 1800, 20)
    sends = [one for one in engine.start() if isinstance(one, Send)]
    by_child: dict[int, list[Send]] = {}
    for send in sends:
        by_child.setdefault(send.header.dest, []).append(send)
    for group in by_child.values():
        pairs = sorted((send.priority, send.header.start) for send in group)
        assert pairs[0][0] < pairs[-1][0]
    assert {send.priority % 2 for send in sends} == {1}, "partial sums have odd priorities, results even ones"


def test_a_layout_that_is_used_again_changes_nothing() -> None:
    """Step after step from one maker of engines: their instructions are those of new engines."""
    fabric = parse("bcube:3x2").without("server:4")
    heads = [send.header for send in expected_frames(1, fabric, 90)]
    frames = dict.fromkeys((head.kind, head.origin, head.dest, head.start, head.stop) for head in heads)
    engines = Engines(Programs(Schedules(fabric, "packed"), 1), lambda nbytes: 4 * 8)
    for step in range(3):
        stamp = Stamp(3, step, 99, 8)
        again, alone = engines.engine(stamp, 90), Engine(plan(fabric).program(1), stamp, 90, 4)
        assert again.start() == alone.start()
        for frame in frames:
            assert again.place(*frame) == alone.place(*frame)
            assert again.received(*frame) == alone.received(*frame)
        assert again.complete
        assert alone.complete
