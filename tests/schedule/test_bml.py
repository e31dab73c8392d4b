"""Healthy BML: the worked examples piece by piece, its time on many fabrics, its local compiler."""

from dataclasses import replace
from fractions import Fraction

import pytest
from counted_steps import counted_steps
from schedule_executor import check_sums, slots

from bml.schedule import Hop, Phase, Range, compile_program, gst, gst_staged, plan, verify
from bml.schedule.ir.program import local_bml
from bml.topology import UsageError, parse


def sends(program):
    """(first piece, last piece, receiver, level) of all that a server sends up, in piece order."""
    return [(p.start, p.stop - 1, p.reduce_to.peer, p.reduce_to.level) for p in program.ranges if p.reduce_to]


def test_18_pieces_on_3x2():
    made = plan(parse("bcube:3x2"))
    assert made.algorithm == "bml"
    forest = made.forest
    assert forest.pieces == 18
    # Thread 0's piece of (a0, a1) is 3·a0 + a1, thread 1's is 9 + 3·a1 + a0.
    for a0 in range(3):
        for a1 in range(3):
            assert forest.root[3 * a0 + a1] == a0 + 3 * a1
            assert forest.root[9 + 3 * a1 + a0] == a0 + 3 * a1
    assert sends(made.program(0)) == [
        (1, 1, 3, 1),
        (2, 2, 6, 1),
        (3, 5, 1, 0),
        (6, 8, 2, 0),
        (10, 10, 1, 0),
        (11, 11, 2, 0),
        (12, 14, 3, 1),
        (15, 17, 6, 1),
    ]
    assert [forest.stage[piece, 0] for piece in (1, 2, 3, 8, 10, 11, 12, 17)] == [1, 1, 0, 0, 1, 1, 0, 0]
    assert slots(forest, made.fabric, Phase.REDUCE) == [6, 2]
    assert slots(forest, made.fabric, Phase.BROADCAST) == [2, 6]
    assert gst_staged(forest, made.fabric) == Fraction(16, 18) == gst(forest, made.fabric)


def test_32_pieces_on_4x2():
    made = plan(parse("bcube:4x2"))
    assert made.forest.pieces == 32
    assert sends(made.program(0)) == [
        (1, 1, 4, 1),
        (2, 2, 8, 1),
        (3, 3, 12, 1),
        (4, 7, 1, 0),
        (8, 11, 2, 0),
        (12, 15, 3, 0),
        (17, 17, 1, 0),
        (18, 18, 2, 0),
        (19, 19, 3, 0),
        (20, 23, 4, 1),
        (24, 27, 8, 1),
        (28, 31, 12, 1),
    ]
    assert slots(made.forest, made.fabric, Phase.REDUCE) == [12, 3]
    assert slots(made.forest, made.fabric, Phase.BROADCAST) == [3, 12]
    assert gst_staged(made.forest, made.fabric) == Fraction(15, 16) == gst(made.forest, made.fabric)


def test_what_a_root_and_an_inner_server_do():
    program = plan(parse("bcube:3x2")).program(0)
    both = (Hop(1, 1, 0), Hop(2, 2, 0))
    everyone = (*both, Hop(3, 3, 1), Hop(6, 6, 1))
    assert program.ranges[0] == Range(0, 1, everyone, None, None, everyone)
    assert program.ranges[1] == Range(1, 2, both, Hop(3, 3, 1), Hop(3, 3, 1), both)
    assert program.ranges[3] == Range(3, 6, (), Hop(1, 1, 0), Hop(1, 1, 0), ())
    assert program.relays == ()


SHAPES = [(2, 1), (5, 1), (2, 2), (3, 2), (4, 2), (7, 2), (2, 3), (3, 3), (4, 3), (2, 4), (3, 4), (2, 5)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_time_on_many_fabrics(n, k):
    fabric = parse(f"bcube:{n}x{k}")
    forest = plan(fabric, "bml").forest
    servers = n**k
    assert verify(forest, fabric) == []
    assert gst(forest, fabric) == Fraction(2 * (servers - 1), k * servers) == gst_staged(forest, fabric)


@pytest.mark.parametrize(
    ("name", "published"),
    [("bcube:4x2", 0.938), ("bcube:4x3", 0.656), ("bcube:4x4", 0.498)],
)
def test_published_values(name, published):
    fabric = parse(name)
    assert float(gst(plan(fabric).forest, fabric)) == pytest.approx(published, abs=0.0006)


@pytest.mark.parametrize(("n", "k"), SHAPES[:9])
def test_the_local_compiler_equals_the_general_one(n, k):
    fabric = parse(f"bcube:{n}x{k}")
    forest = plan(fabric).forest
    for server in fabric.servers:
        program = local_bml(fabric, server)
        assert replace(program, bundles=()) == compile_program(forest, server)
        assert len(program.ranges) == k * (k * (n - 1) + 1)


@pytest.mark.parametrize(("n", "k"), SHAPES[:9])
def test_what_comes_up_in_one_range_goes_down_in_one_bundle(n, k):
    fabric = parse(f"bcube:{n}x{k}")
    programs = {server: local_bml(fabric, server) for server in fabric.servers}
    for server, program in programs.items():
        sent = {(bundle.start, bundle.stop, hop.peer) for bundle in program.bundles for hop in bundle.hops}
        wide = {
            (part.start, part.stop, child)
            for child, theirs in programs.items()
            for part in theirs.ranges
            if part.reduce_to and part.reduce_to.peer == server and part.stop - part.start > 1
        }
        assert sent == wide


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:4x2", "bcube:2x3", "bcube:3x3"])
def test_programs_sum_on_every_server(name):
    fabric = parse(name)
    made = plan(fabric)
    programs = {server: made.program(server) for server in fabric.servers}
    check_sums(fabric, programs, n_elements=1000)


@pytest.mark.parametrize("n_elements", [0, 1, 7, 17, 18, 19])
def test_vectors_shorter_than_the_pieces(n_elements):
    fabric = parse("bcube:3x2")
    made = plan(fabric)
    check_sums(fabric, {server: made.program(server) for server in fabric.servers}, n_elements)


def test_cuts_are_exact_and_cover_the_vector():
    program = plan(parse("bcube:3x2")).program(4)
    assert [program.cut(piece, 36) for piece in range(19)] == list(range(0, 37, 2))
    assert program.cut(18, 10**15 + 7) == 10**15 + 7
    assert program.cut(7, 100) == 7 * 100 // 18


def test_4096_servers_compile_locally():
    fabric = parse("bcube:8x4")
    for server in (0, 1234, 4095):
        program = plan(fabric).program(server)
        assert len(program.ranges) == 4 * (4 * 7 + 1)
        assert program.pieces == 4 * 4096
        assert program.ranges[0].start == 0
        assert program.ranges[-1].stop == program.pieces
        assert all(a.stop == b.start for a, b in zip(program.ranges, program.ranges[1:], strict=False))
        # 27,074 instructions: it looks at its own ranges, not at 4096 servers or 16,384 pieces.
        assert counted_steps(lambda server=server: plan(fabric).program(server)) < 100_000


def test_the_local_compiler_is_for_healthy_fabrics():
    with pytest.raises(UsageError, match="damaged"):
        local_bml(parse("bcube:3x2").without("server:4"), 0)
