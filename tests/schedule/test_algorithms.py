"""Every algorithm on every family: the papers' formulas and values, sound forests, right sums."""

from fractions import Fraction
from math import prod

import numpy as np
import pytest
from every_algorithm import FORESTS
from schedule_executor import check_sums

from bml.schedule import Plan, gst, gst_staged, load, plan, verify
from bml.schedule.algorithms.flextree import factors
from bml.schedule.algorithms.ring import alternating_order, gray_order
from bml.schedule.select.formulas import dedicated_server, formula
from bml.topology import UsageError, parse

FABRICS = ["bcube:3x2", "bcube:4x2", "bcube:2x3", "torus:2x2", "torus:3x2", "torus:4x2", "torus:2x3"]
FABRICS += ["switch:5", "fattree:4", "fattree:4/6"]


@pytest.mark.few(60)
@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("algorithm", FORESTS)
def test_healthy_forests_are_sound_and_sum(name, algorithm):
    check_forest(plan(parse(name), algorithm), n_elements=67)


def check_forest(made: Plan, n_elements: int) -> None:
    """The trees are sound and sum, unless the argument asks for more servers than there are."""
    fabric, argument = made.fabric, made.algorithm.partition(":")[2]
    if argument[:1].isdigit() and prod(map(int, argument.split("x"))) > len(fabric.servers):
        with pytest.raises(UsageError, match=rf"{made.algorithm} needs \d+ servers"):
            made.forest  # noqa: B018
        return
    assert verify(made.forest, fabric) == []
    check_sums(fabric, {server: made.program(server) for server in fabric.servers}, n_elements)


LARGER = [
    "bcube:5x2",
    "bcube:4x3",
    "bcube:3x3",
    "bcube:2x4",
    "bcube:2x2",
    "torus:5x2",
    "torus:6x2",
    "torus:4x3",
]
LARGER += ["torus:3x1", "torus:2x1", "torus:8x1", "torus:3x3", "switch:2", "switch:17", "fattree:6"]


@pytest.mark.few(40)
@pytest.mark.parametrize("name", FABRICS + LARGER)
@pytest.mark.parametrize("algorithm", ["mesh", "ring", "ring:both", "hips", "bml"])
def test_formulas_hold_exactly_by_construction(name, algorithm):
    fabric = parse(name)
    forest = plan(fabric, algorithm).forest
    assert verify(forest, fabric) == []
    assert gst(forest, fabric) == formula(fabric, algorithm)


@pytest.mark.parametrize(
    ("name", "algorithm", "expected"),
    [
        ("bcube:4x2", "hips", Fraction(15, 16)),
        ("bcube:4x2", "mesh", Fraction(3, 2)),
        ("bcube:4x2", "ring", Fraction(15, 8)),
        ("bcube:4x2", "ring:both", Fraction(15, 16)),
        ("bcube:3x2", "ring:both", Fraction(16, 9)),
        ("torus:4x2", "hips", Fraction(15, 32)),
        ("torus:4x2", "mesh", Fraction(1)),
        ("torus:5x2", "mesh", Fraction(24, 20)),
        ("torus:4x2", "ring", Fraction(15, 16)),
        ("switch:16", "mesh", Fraction(15, 8)),
        ("switch:16", "ring", Fraction(15, 8)),
        ("fattree:4", "hips", Fraction(15, 8)),
    ],
)
def test_values_of_the_formulas(name, algorithm, expected):
    assert formula(parse(name), algorithm) == expected


# h = 2, 3, 4: HiPS, mesh and ring on BCube, then on torus.
PUBLISHED = {
    4: [(0.938, 0.656, 0.498), (1.5, 1.5, 1.5), (1.875, 1.969, 1.992)],
    8: [(0.984, 0.665, 0.500), (1.75, 1.75, 1.75), (1.969, 1.996, 2.000)],
    16: [(0.996, 0.667, 0.500), (1.875, 1.875, 1.875), (1.992, 2.000, 2.000)],
}
PUBLISHED_TORUS = {
    4: [(0.469, 0.328, 0.249), (1.0, 1.0, 1.0), (0.938, 0.984, 0.996)],
    8: [(0.492, 0.333, 0.250), (2.0, 2.0, 2.0), (0.984, 0.998, 1.000)],
    16: [(0.498, 0.333, 0.250), (4.0, 4.0, 4.0), (0.996, 1.000, 1.000)],
}


@pytest.mark.parametrize(("family", "table"), [("bcube", PUBLISHED), ("torus", PUBLISHED_TORUS)])
@pytest.mark.parametrize("n", [4, 8, 16])
def test_the_table_of_n_and_h(family, table, n):
    for algorithm, row in zip(("hips", "mesh", "ring"), table[n], strict=True):
        for h, value in zip((2, 3, 4), row, strict=True):
            assert float(formula(parse(f"{family}:{n}x{h}"), algorithm)) == pytest.approx(value, abs=0.0006)


def test_a_dedicated_server_with_n_workers_takes_2n_stage_by_stage():
    fabric = parse("switch:9")
    forest = plan(fabric, "ps").forest
    assert gst_staged(forest, fabric) == dedicated_server(workers=8) == 16
    assert gst(forest, fabric) == 8
    assert forest.root.tolist() == [0]
    assert plan(fabric, "ps:3").forest.root.tolist() == [0, 3, 6]
    assert gst(plan(fabric, "ps:9").forest, fabric) == gst(plan(fabric, "mesh").forest, fabric)
    with pytest.raises(UsageError, match="ask for 1 to 9"):
        plan(fabric, "ps:10").forest  # noqa: B018


@pytest.mark.parametrize(
    "name", ["bcube:3x2", "bcube:4x2", "bcube:2x4", "torus:3x2", "torus:4x2", "torus:5x1"]
)
def test_a_gray_ring_takes_direct_hops_only(name):
    fabric = parse(name)
    order = gray_order(fabric)
    assert sorted(order) == list(fabric.servers)
    for a, b in zip(order, order[1:] + order[:1], strict=True):
        assert len(fabric.route(a, b)) == 1
    assert plan(fabric, "ring").forest.detours == {}


@pytest.mark.parametrize(
    "name", ["bcube:2x2", "bcube:4x2", "bcube:6x2", "bcube:2x3", "bcube:4x3", "bcube:2x5"]
)
def test_an_alternating_ring_enters_and_leaves_over_different_levels(name):
    fabric = parse(name)
    order = alternating_order(fabric)
    assert sorted(order) == list(fabric.servers)
    routes = [fabric.route(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True)]
    assert all(len(route) == 1 for route in routes)
    levels = [route[0][1] for route in routes]
    assert all(a != b for a, b in zip(levels, levels[1:] + levels[:1], strict=True))


def test_hips_with_a_mesh_inside_is_bml():
    fabric = parse("bcube:3x3")
    bml, hips = plan(fabric, "bml").forest, plan(fabric, "hips:mesh").forest
    for column in ("root", "weight", "parent", "level", "stage"):
        assert (getattr(bml, column) == getattr(hips, column)).all()


def test_hips_leaves_a_choice_inside_the_group():
    torus = parse("torus:4x2")
    assert gst(plan(torus, "hips:ring").forest, torus) == Fraction(15, 32)
    assert gst(plan(torus, "hips:mesh").forest, torus) == Fraction(5, 8)
    assert gst_staged(plan(torus, "hips:ring").forest, torus) == Fraction(15, 32)
    cube = parse("bcube:4x2")
    assert gst(plan(cube, "hips:ring").forest, cube) == Fraction(15, 16)
    assert plan(cube, "hips:ps").forest.root.tolist() == [0, 0]


def test_hips_over_tiers_of_a_fat_tree_sends_little_through_the_core():
    fabric = parse("fattree:6")
    tiers, mesh = plan(fabric, "hips:tiers"), plan(fabric, "mesh")
    assert tiers.violations() == []
    assert gst(tiers.forest, fabric) == gst(mesh.forest, fabric) == Fraction(2 * 53, 54)

    def crossing(forest, n_servers):
        """The share of all sums sent that leave groups of so many servers."""
        piece, server = np.nonzero(forest.parent >= 0)
        return np.mean(forest.parent[piece, server] // n_servers != server // n_servers)

    # Of 53 sums for each piece, one a pod crosses the core but the root's own: 5; in a mesh all of 5 pods.
    assert crossing(tiers.forest, 9) == pytest.approx(5 / 53)
    assert crossing(mesh.forest, 9) == pytest.approx(45 / 53)
    assert crossing(tiers.forest, 3) == pytest.approx((5 + 6 * 2) / 53)


@pytest.mark.parametrize("failures", [("server:3",), ("server:0", "server:1"), ("server:4", "server:13")])
def test_hips_over_tiers_goes_round_the_dead(failures):
    fabric = parse("fattree:4").without(*failures)
    forest = plan(fabric, "hips:tiers").forest
    assert verify(forest, fabric) == []
    assert sorted({*forest.root.tolist()}) == list(fabric.servers)


@pytest.mark.parametrize("name", ["fattree:4/15", "bcube:3x2", "switch:16"])
def test_hips_over_tiers_needs_a_whole_fat_tree(name):
    with pytest.raises(UsageError, match=r"needs a Fat-Tree with all its servers.*ask for hips"):
        _ = plan(parse(name), "hips:tiers").forest


@pytest.mark.parametrize(
    ("servers", "widths"), [(1, [1]), (2, [2]), (3, [3]), (7, [3, 2]), (12, [3, 2, 2]), (13, [3, 2, 2])]
)
def test_flextree_chooses_its_widths(servers, widths):
    assert factors(servers) == widths


def test_flextree_of_one_wide_stage_is_a_mesh_and_of_ones_a_ring():
    fabric = parse("switch:8")
    for shape in ("8", "4x2", "2x2x2", "1", "1x1"):
        assert gst(plan(fabric, f"flextree:{shape}").forest, fabric) == Fraction(14, 8)
    assert plan(fabric, "flextree:8").forest.n_stages(0) == 1
    assert plan(fabric, "flextree:4x2").forest.n_stages(0) == 2
    assert plan(fabric, "flextree:1").forest.n_stages(0) == 7


def test_flextree_with_a_prime_number_leaves_one_outside():
    fabric = parse("switch:7")
    made = plan(fabric, "flextree:3x2")
    assert verify(made.forest, fabric) == []
    assert sorted(made.forest.root.tolist()) == [0, 1, 2, 3, 4, 5]
    assert 6 not in made.forest.parent
    assert gst(plan(fabric, "flextree:7").forest, fabric) == Fraction(12, 7)
    damaged = parse("bcube:3x2").without("server:4", "server:0")
    assert verify(plan(damaged, "flextree:2x3").forest, damaged) == []
    with pytest.raises(UsageError, match="needs 9 servers"):
        plan(damaged, "flextree:3x3").forest  # noqa: B018


def test_binary_tree_of_a_switch():
    fabric = parse("switch:7")
    forest = plan(fabric, "tree").forest
    assert forest.parent.tolist() == [[-1, 0, 0, 1, 1, 2, 2]]
    assert gst(forest, fabric) == 3
    assert gst_staged(forest, fabric) == 8


def test_a_slow_link_counts_by_its_rate():
    fabric = parse("switch:4").with_rates({(2, 0): "1/4"})
    forest = plan(fabric, "mesh").forest
    assert gst(forest, fabric) == 4 * Fraction(6, 4) == gst_staged(forest, fabric)
    assert load(forest, fabric).busiest == Fraction(6, 4)
    fast = parse("switch:4").with_rates({(server, 0): "2.5" for server in range(4)})
    assert gst(forest, fast) == Fraction(6, 4) / Fraction(5, 2)


def test_inner_links_of_a_fat_tree_are_counted():
    fabric = parse("fattree:4")
    ring = load(plan(fabric, "ring").forest, fabric)
    # Servers in id order: one flow leaves every edge switch, it never meets another.
    assert ring.hottest_inner == ring.busiest == Fraction(15, 8)
    mesh = load(plan(fabric, "mesh").forest, fabric)
    assert mesh.hottest_inner > mesh.busiest
    assert load(plan(parse("bcube:3x2"), "mesh").forest, parse("bcube:3x2")).hottest_inner == 0


@pytest.mark.few(30)
@pytest.mark.parametrize("algorithm", FORESTS)
@pytest.mark.parametrize(
    "failures",
    [("server:1",), ("server:0", "server:5"), ("link:0/0",), ("link:2/1", "server:3"), ("switch:0/0",)],
)
@pytest.mark.parametrize("name", ["bcube:3x2", "torus:3x2", "torus:4x2"])
def test_damaged_forests_are_sound_and_sum(name, algorithm, failures):
    check_forest(plan(parse(name).without(*failures), algorithm), n_elements=41)


def test_too_many_relayed_edges_are_refused(monkeypatch):
    monkeypatch.setattr("bml.schedule.ir.drawing.MAX_RELAYED", 100)
    with pytest.raises(UsageError, match="144 tree edges of this schedule on bcube:4x2 join no neighbours"):
        plan(parse("bcube:4x2"), "mesh").forest  # noqa: B018


@pytest.mark.parametrize("name", ["ring", "ring:both", "mesh", "hips", "flextree", "flextree:1"])
def test_trees_that_are_too_many_to_be_built_are_refused_at_once(name):
    with pytest.raises(UsageError, match=r"trees of 19683 servers would take .* plan a smaller fabric"):
        plan(parse("bcube:3x9"), name).build()
