"""The bound is the proved optimum where that is known, says whether it is, and no forest ever beats it."""

from fractions import Fraction

import numpy as np
import pytest
from damage import random_rates, random_sets, single_failures
from hypothesis import given, settings
from hypothesis import strategies as st

from bml.schedule import Forest, bound, bound_kind, gst, plan, prove, verify
from bml.schedule.bounds.lp import best_prices
from bml.schedule.bounds.symmetry import alike
from bml.schedule.ir.nics import cheapest_tree, cut_bound, number_nics, price_bound
from bml.topology import FabricError, parse


@pytest.mark.parametrize(
    ("name", "failure", "expected"),
    [
        ("bcube:3x2", None, Fraction(8, 9)),
        ("bcube:4x2", None, Fraction(15, 16)),
        ("bcube:2x3", None, Fraction(7, 12)),
        ("bcube:4x3", None, Fraction(21, 32)),
        ("bcube:3x2", "server:4", Fraction(7, 8)),
        ("bcube:4x2", "server:4", Fraction(14, 15)),
        ("bcube:2x3", "server:4", Fraction(2, 3)),
        ("bcube:4x3", "server:4", Fraction(124, 189)),
        ("bcube:3x2", "link:4/1", 1),
        ("bcube:4x2", "link:4/1", 1),
        ("bcube:2x3", "link:4/1", Fraction(7, 11)),
        ("bcube:4x3", "link:4/1", Fraction(126, 191)),
        ("bcube:3x2", "switch:1/1", Fraction(16, 15)),
        ("bcube:4x2", "switch:1/1", Fraction(15, 14)),
        ("bcube:2x3", "switch:1/1", Fraction(7, 11)),
        ("bcube:4x3", "switch:1/1", Fraction(63, 94)),
        ("bcube:16x2", "server:77", Fraction(254, 255)),
        ("torus:4x2", None, Fraction(15, 32)),
        ("torus:5x2", None, Fraction(12, 25)),
        ("switch:9", "server:4", Fraction(7, 4)),
        ("fattree:4", None, Fraction(15, 8)),
    ],
)
def test_known_optima(name, failure, expected):
    fabric = parse(name).without(*([failure] if failure else []))
    assert bound(fabric) == expected
    assert bound_kind(fabric) == "optimum"


@pytest.mark.parametrize(
    ("name", "failures", "cuts", "expected"),
    [
        # Servers 8-11 hang on level 1 alone and 12 on level 0 alone: what joins them is scarce.
        ("bcube:4x2", ("link:7/0", "link:12/1", "link:4/0", "switch:0/2"), Fraction(6, 5), Fraction(4, 3)),
        ("bcube:4x2", ("switch:0/3", "link:4/0", "link:2/0", "link:10/0", "server:15"), Fraction(7, 6), 1.5),
    ],
)
def test_the_programme_proves_more_than_the_cuts(name, failures, cuts, expected):
    fabric = parse(name).without(*failures)
    assert cut_bound(number_nics(fabric)) == cuts
    assert prove(fabric).value == expected
    assert prove(fabric).kind == "optimum"
    assert gst(plan(fabric, "packed").forest, fabric) >= expected


def test_rates():
    """A server whose only link has a tenth of the rate needs ten times as long."""
    slow = parse("switch:5").with_rates({(2, 0): "1/10"})
    assert bound(slow) == 10
    half = parse("bcube:4x2").with_rates({(server, 0): "1/2" for server in range(16)})
    assert bound(half) == Fraction(30, 24)
    doubled = parse("bcube:4x2").with_rates(
        {(server, level): 2 for server in range(16) for level in range(2)}
    )
    assert bound(doubled) == Fraction(15, 32)


def test_few_survivors():
    assert bound(parse("bcube:2x2").without("server:0", "server:1", "server:2")) == 0
    two = parse("torus:2x1")
    assert (bound(two), bound_kind(two)) == (Fraction(1, 2), "optimum")
    with pytest.raises(FabricError, match=r"server 4 of .* is cut off"):
        bound(parse("bcube:3x2").without("link:4/0", "link:4/1"))


@pytest.mark.slow
def test_large_fabrics():
    """Symmetry makes single failures of 1024 servers small; without it the bound says that it may be low."""
    fabric = parse("bcube:32x2").without("switch:0/7")
    assert (bound(fabric), bound_kind(fabric)) == (Fraction(341, 336), "optimum")
    # 1536 links of random rates have nothing in common.
    mixed = random_rates(parse("bcube:8x3"), seed=3)
    assert bound_kind(mixed) == "lower bound"
    assert bound(mixed) == cut_bound(number_nics(mixed))


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3", "torus:3x2", "torus:4x1"])
def test_symmetry_changes_nothing(name):
    """Classes of like NICs give the same optimum as a price for each NIC of its own."""
    for fabric in random_sets(name, 6, seed=1, most=2):
        nics = number_nics(fabric)
        own = best_prices(nics, list(range(len(nics.owner))))
        shared = best_prices(nics, alike(nics))
        assert shared.ceiling == pytest.approx(own.ceiling, rel=1e-7)
        assert float(bound(fabric)) == pytest.approx(own.ceiling, rel=1e-7)


def test_like_nics_of_a_lost_server():
    """Around a lost server: its neighbours, whose NICs differ, and the others, whose NICs are all alike."""
    nics = number_nics(parse("bcube:4x2").without("server:5"))
    assert len(set(alike(nics))) == 3
    assert len(set(alike(number_nics(parse("torus:4x2"))))) == 1
    with_rate = number_nics(parse("bcube:3x2").with_rates({(0, 0): 2}))
    assert alike(with_rate).count(alike(with_rate)[with_rate.of[0][0]]) == 1


def test_the_cheapest_tree_is_a_minimum_spanning_tree():
    import networkx as nx

    rng = np.random.default_rng(5)
    for fabric in random_sets("bcube:4x2", 10, seed=2):
        nics = number_nics(fabric)
        prices = rng.integers(0, 20, len(nics.owner)).tolist()
        graph = nx.MultiGraph()
        for members in nics.members:
            for i, a in enumerate(members):
                for b in members[:i]:
                    graph.add_edge(nics.owner[a], nics.owner[b], weight=prices[a] + prices[b])
        wanted = sum(data["weight"] for *_, data in nx.minimum_spanning_edges(graph, data=True))
        tree = cheapest_tree(nics, prices)
        assert len(tree) == len(nics.servers) - 1
        assert sum(prices[a] + prices[b] for a, b in tree) == wanted


def random_forest(fabric, pieces, seed):
    """Any sound forest at all: random trees, roots, shares, and a way down of its own in half of them."""
    rng = np.random.default_rng(seed)
    tables = []
    for root in rng.choice(np.array(fabric.servers), pieces):
        parent = np.full(fabric.n_servers, -2, np.int32)
        level = np.full(fabric.n_servers, -1, np.int8)
        depth = {int(root): 0}
        parent[root] = -1
        while len(depth) < len(fabric.servers):
            server = int(rng.choice(list(depth)))
            nic = int(rng.integers(fabric.levels))
            for other in fabric.neighbours(server, nic):
                if other not in depth and rng.random() < 0.5:
                    depth[other], parent[other], level[other] = depth[server] + 1, server, nic
        stage = np.full(fabric.n_servers, -1, np.int16)
        for server, hops in depth.items():
            stage[server] = fabric.n_servers - hops if hops else -1
        tables.append((root, parent, level, stage))
    root, parent, level, stage = (np.array(column) for column in zip(*tables, strict=True))
    weight = rng.integers(1, 50, pieces)
    return Forest(root.astype(np.int32), weight.astype(np.int64), parent, level, stage)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["bcube:3x2", "bcube:4x2", "bcube:2x3", "torus:3x2", "torus:4x2", "switch:6"]),
    seed=st.integers(0, 10**6),
    rated=st.booleans(),
)
def test_no_forest_beats_the_bound(name, seed, rated):
    (fabric,) = random_sets(name, 1, seed, most=4)
    fabric = random_rates(fabric, seed) if rated else fabric
    nics = number_nics(fabric)
    proved = bound(fabric)
    assert proved >= cut_bound(nics)
    forest = random_forest(fabric, 6, seed)
    assert verify(forest, fabric) == []
    best = gst(plan(fabric, "packed").forest, fabric)
    assert gst(forest, fabric) >= proved
    assert best >= proved
    for algorithm in ("detour", "mesh", "ring", "tree", "hips"):
        try:
            made = plan(fabric, algorithm).forest
        except FabricError:
            continue
        assert gst(made, fabric) >= proved
    prices = np.random.default_rng(seed).integers(0, 9, len(nics.owner)).tolist()
    assert price_bound(nics, prices) <= proved or bound_kind(fabric) != "optimum"


@pytest.mark.slow
def test_every_single_failure_of_small_fabrics_is_solved():
    for name in ("bcube:3x2", "bcube:2x3", "torus:4x2"):
        for failure in single_failures(name):
            assert bound_kind(parse(name).without(failure)) == "optimum"
