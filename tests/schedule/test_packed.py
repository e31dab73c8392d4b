"""Packed trees: sound, near the proved optimum, never worse than the paper's way, the same every time."""

import time
from fractions import Fraction

import numpy as np
import pytest
from damage import damaged_by, pairs, random_rates, random_sets, single_failures
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import first
from schedule_executor import check_sums

from bml.schedule import bound, compile_program, gst, plan, verify
from bml.schedule.ir.nics import number_nics
from bml.schedule.packed.packing import _plan, fits, packed
from bml.schedule.packed.search import Search
from bml.schedule.packed.symmetry import representative, without_repeats
from bml.topology import FabricError, UsageError, parse


def ratio(fabric):
    """How far a packed plan is above the optimum, after its proof."""
    forest = packed(fabric)
    assert verify(forest, fabric) == [], str(fabric)
    assert forest.detours == {}
    return float(gst(forest, fabric) / bound(fabric))


@pytest.mark.parametrize("name", first(3, ["bcube:3x2", "bcube:4x2", "bcube:2x3", "bcube:3x3", "bcube:5x2"]))
def test_every_single_failure(name):
    ratios = {failure: ratio(parse(name).without(failure)) for failure in single_failures(name)}
    assert max(ratios.values()) <= 1.02, max(ratios.items(), key=lambda item: item[1])


@pytest.mark.parametrize("failure", ["server:21", "link:21/2", "switch:2/7"])
def test_single_failures_of_64_servers(failure):
    assert ratio(parse("bcube:4x3").without(failure)) <= 1.02


@pytest.mark.parametrize(
    ("name", "failure", "expected"),
    [
        ("bcube:3x2", "server:0", 0.8750),
        ("bcube:4x2", "server:0", 0.9333),
        ("bcube:3x2", "link:0/0", 1.0000),
        ("bcube:4x2", "link:0/0", 1.0000),
        ("bcube:3x2", "switch:0/0", 1.0667),
        ("bcube:2x3", "server:0", 0.6667),
    ],
)
def test_the_optimum_itself(name, failure, expected):
    fabric = parse(name).without(failure)
    assert float(gst(packed(fabric), fabric)) == pytest.approx(expected, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("bcube:3x2", 24), ("bcube:4x2", 90)])
def test_pairs_of_failures(name, every):
    ratios = [ratio(fabric) for fabric in pairs(name)[::every]]
    assert np.mean(ratios) <= 1.05
    assert max(ratios) <= 1.15


@pytest.mark.slow
@pytest.mark.parametrize("name", first(1, ["bcube:4x2", "bcube:3x3", "torus:4x2"]))
def test_random_failure_sets(name):
    ratios = [ratio(fabric) for fabric in random_sets(name, 20, seed=11)]
    assert np.mean(ratios) <= 1.05
    assert max(ratios) <= 1.15


def test_a_fabric_that_needs_deep_trees():
    """Found by chance: within four hops nothing is better than 1.08 times the optimum."""
    fabric = damaged_by("bcube:4x2", "link:2/1", "link:15/0", "link:6/0", "link:1/0", "link:11/0", "server:4")
    assert ratio(fabric) <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bcube:4x2", "torus:4x2", "switch:6"])
def test_links_of_different_rates(name):
    ratios = [ratio(random_rates(parse(name), seed)) for seed in range(2)]
    slow = parse(name).with_rates({link: "1/2" for link in parse(name).links if link[0] % 2})
    assert max(*ratios, ratio(slow)) <= 1.05


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bcube:3x2", Fraction(8, 9)), ("bcube:4x3", Fraction(21, 32)), ("torus:4x2", Fraction(15, 32))],
)
def test_a_healthy_fabric_is_no_worse_than_bml(name, expected):
    fabric = parse(name)
    assert gst(packed(fabric), fabric) == expected <= gst(plan(fabric, "bml").forest, fabric)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["bcube:2x2", "bcube:3x2", "bcube:4x2", "bcube:2x3", "torus:3x2", "torus:4x2"]),
    seed=st.integers(0, 10**6),
    rated=st.booleans(),
)
def test_sums_are_right_and_never_slower_than_detours(name, seed, rated):
    (fabric,) = random_sets(name, 1, seed, most=3)
    fabric = random_rates(fabric, seed) if rated else fabric
    forest = packed(fabric)
    assert verify(forest, fabric) == []
    assert bound(fabric) <= gst(forest, fabric) <= gst(plan(fabric, "detour").forest, fabric)
    programs = {server: compile_program(forest, server) for server in fabric.servers}
    check_sums(fabric, programs, n_elements=300, seed=seed)


@pytest.mark.parametrize("failure", ["server:7", "link:3/1", "switch:1/2"])
def test_right_sums_with_unequal_shares(failure):
    fabric = parse("bcube:4x2").without(failure)
    made = plan(fabric)
    assert made.algorithm == "packed"
    assert len(set(made.forest.weight.tolist())) > 1
    check_sums(fabric, {server: made.program(server) for server in fabric.servers}, n_elements=1001)


def same(one, other):
    return all(
        np.array_equal(getattr(one, column), getattr(other, column))
        for column in ("root", "weight", "parent", "level", "stage")
    )


def test_the_same_input_gives_the_same_forest():
    """Every server plans alone, some from memory and some anew; what is reported twice changes nothing."""
    fabric = parse("bcube:4x2").without("server:5", "link:0/1")
    first = packed(fabric)
    _plan.cache_clear()
    assert same(first, packed(fabric))
    assert same(first, packed(fabric.without("link:5/0")))
    assert without_repeats(parse("bcube:4x2").without("switch:0/0", "link:1/0")) == parse(
        "bcube:4x2"
    ).without("switch:0/0")


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3", "bcube:4x2"])
def test_one_plan_serves_all_failures_that_look_alike(name):
    healthy = parse(name)
    first = set()
    for failure in single_failures(name):
        fabric = healthy.without(failure)
        case, symmetry = representative(fabric)
        first.add(str(case))
        if symmetry is None:
            assert case == fabric
            continue
        # A symmetry maps what is alive onto what is alive, group by group.
        alive = np.array(case.nics)[np.argsort(symmetry.server)][:, np.argsort(symmetry.level)]
        assert np.array_equal(alive, fabric.nics)
        assert gst(packed(fabric), fabric) == gst(packed(case), case)
    assert first == {f"{name} without {one}" for one in ("server:0", "link:0/0", "switch:0/0")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3", "bcube:4x2"])
def test_programs_seen_through_a_symmetry_are_those_of_the_forest_written_down(name):
    for failure in single_failures(name):
        made = plan(parse(name).without(failure), "packed")
        for server in made.fabric.servers:
            assert made.program(server) == compile_program(made.forest, server)


def test_relays_seen_through_a_symmetry():
    cube = parse("bcube:3x2")
    forest = plan(cube.without("server:0"), "detour").forest
    _, symmetry = representative(cube.without("server:5"))
    shown = symmetry.apply(forest)
    moved = {
        (piece, int(symmetry.server[child])): tuple(
            (int(symmetry.server[a]), int(symmetry.level[level]), int(symmetry.server[b]))
            for a, level, b in path
        )
        for (piece, child), path in forest.detours.items()
    }
    assert moved
    assert shown.detours == moved
    for server in cube.without("server:5").servers:
        expected = compile_program(shown, server)
        assert compile_program(forest, server, symmetry) == expected
    with pytest.raises(UsageError, match="server 5 has no part"):
        compile_program(forest, 5, symmetry)
    with pytest.raises(UsageError, match="server 9 has no part"):
        compile_program(forest, 9, symmetry)


@pytest.mark.slow
def test_planning_has_a_bounded_effort():
    """What took longest by chance: the effort is counted, so that it ends alike on every server."""
    for name, failures in (
        ("bcube:3x2", ("link:0/1", "link:5/0", "link:7/0", "switch:0/2")),
        ("bcube:4x2", ("server:14", "link:3/0", "link:7/1", "link:9/1", "link:13/1")),
        ("bcube:4x2", ("server:1", "server:7", "link:1/1", "link:2/1", "link:4/0")),
    ):
        fabric = parse(name).without(*failures)
        search = Search(number_nics(fabric))
        search.run(6)
        assert search.effort <= 1.1 * 600 * len(fabric.servers)
        assert ratio(fabric) <= 1.02


def best_ms(work, times=5):
    """Time of the quickest of some runs: the others were disturbed."""
    found = []
    for _ in range(times):
        start_s = time.process_time()
        work()
        found.append((time.process_time() - start_s) * 1e3)
    return min(found)


@pytest.mark.serial("the time to plan is promised")
@pytest.mark.parametrize(
    ("name", "failure", "limit_ms"),
    [
        ("bcube:4x2", "server:3", 20),
        ("bcube:4x2", "link:3/1", 20),
        ("bcube:4x2", "switch:1/3", 20),
        ("bcube:4x3", "link:3/1", 200),
    ],
)
def test_planning_is_quick(name, failure, limit_ms):
    """Twice the time that is promised, on processor time: this machine may be busy with something else."""
    fabric = parse(name).without(failure)

    def anew():
        _plan.cache_clear()
        packed(fabric)

    assert best_ms(anew) <= 2 * limit_ms
    assert best_ms(lambda: packed(fabric)) <= 2 * 2


def test_trees_stay_shallow_and_few():
    for failure in ("server:0", "link:0/0", "switch:0/0"):
        for name, levels in (("bcube:4x2", 2), ("bcube:3x3", 3)):
            fabric = parse(name).without(failure)
            forest = packed(fabric)
            assert forest.n_stages(0) <= levels + 2
            assert forest.pieces <= 12 * len(fabric.servers)


def test_few_survivors():
    alone = parse("bcube:2x2").without("server:0", "server:1", "server:2")
    forest = packed(alone)
    assert verify(forest, alone) == []
    assert (gst(forest, alone), forest.pieces, forest.root.tolist()) == (0, 1, [3])
    two = parse("bcube:2x2").without("server:0", "server:1")
    assert ratio(two) == 1
    whole_group = parse("bcube:3x2").without("server:0", "server:1", "server:2")
    assert ratio(whole_group) <= 1.02


def test_what_cannot_be_packed():
    with pytest.raises(FabricError, match=r"fall into parts: .*server\(s\) 4\."):
        plan(parse("bcube:3x2").without("link:4/0", "link:4/1"), "packed")
    with pytest.raises(FabricError, match=r"server 4 of .* is cut off"):
        packed(parse("bcube:3x2").without("link:4/0", "link:4/1"))
    large = parse("bcube:16x3").without("server:0")
    assert not fits(large)
    with pytest.raises(FabricError, match="too large to be packed"):
        packed(large)
    assert plan(large).algorithm == "detour"
    assert plan(parse("bcube:3x2").with_rates({(0, 0): 2})).algorithm == "packed"
