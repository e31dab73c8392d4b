"""The paper's schedule on damaged fabrics: its numbers, its paths, and random damage under the oracle."""

import random
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_executor import check_sums, slots

from bml.faults.detour import MAX_CHOICES, shortest_paths
from bml.faults.repartition import owners, stand_in
from bml.schedule import Phase, bound, gst, gst_staged, plan, verify
from bml.topology import FabricError, parse


def forest_of(name, *failures):
    fabric = parse(name).without(*failures)
    forest = plan(fabric, "detour").forest
    assert verify(forest, fabric) == []
    return forest, fabric


def test_30_pieces_with_server_1_of_16_dead():
    """The document numbers the servers 1..16 row by row, so its server i is our i-1."""
    forest, fabric = forest_of("bcube:4x2", "server:0")
    assert forest.pieces == 30
    walks = {}
    for (piece, _), path in forest.detours.items():
        thread = piece // 15
        walks.setdefault(thread, []).append([path[0][0] + 1, *(hop[2] + 1 for hop in path)])
    assert walks == {
        0: [[2, 6, 5], [3, 11, 9], [4, 16, 13]],
        1: [[5, 6, 2], [9, 11, 3], [13, 16, 4]],
    }
    assert slots(forest, fabric, Phase.REDUCE) == [12, 4]
    assert slots(forest, fabric, Phase.BROADCAST) == [4, 12]
    assert gst_staged(forest, fabric) == Fraction(32, 30)


@pytest.mark.parametrize("m", range(2, 9))
def test_one_server_of_two_levels_costs_m2_over_m2_minus_1(m):
    forest, fabric = forest_of(f"bcube:{m}x2", f"server:{m + 1}")
    assert forest.pieces == 2 * (m * m - 1)
    assert gst_staged(forest, fabric) == Fraction(m * m, m * m - 1)


@pytest.mark.parametrize(
    ("n", "k", "expected"),
    [
        (2, 2, Fraction(4, 3)),
        (3, 2, Fraction(9, 8)),
        (4, 2, Fraction(16, 15)),
        (2, 3, Fraction(20, 21)),
        (3, 3, Fraction(10, 13)),
        (4, 3, Fraction(136, 189)),
        (2, 4, Fraction(11, 15)),
        (3, 4, Fraction(93, 160)),
    ],
)
def test_one_server_of_k_levels(n, k, expected):
    formula = Fraction(2, k * (n**k - 1)) * ((n - 1) * n ** (k - 1) + Fraction(n**k - n, n - 1))
    assert formula == expected
    for server in (0, n**k // 2, n**k - 1):
        forest, fabric = forest_of(f"bcube:{n}x{k}", f"server:{server}")
        assert gst_staged(forest, fabric) == expected
        assert gst(forest, fabric) <= expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bcube:3x2", 1.7778), ("bcube:4x2", 1.8750), ("bcube:2x3", 0.8750), ("bcube:4x3", 0.9844)],
)
@pytest.mark.parametrize("failure", ["link:0/0", "link:5/1", "switch:0/0", "switch:1/2"])
def test_plain_detours_of_links_and_switches_are_pipelined_times(name, expected, failure):
    """A server that lost one of k NICs pushes the same bytes through the others: k/(k-1) of healthy."""
    forest, fabric = forest_of(name, failure)
    n, k = fabric.ports, fabric.levels
    assert gst(forest, fabric) == Fraction(2 * (n**k - 1), k * n**k) * Fraction(k, k - 1)
    assert float(gst(forest, fabric)) == pytest.approx(expected, abs=5e-5)


def test_n_minus_f_owners_in_piece_order():
    fabric = parse("bcube:3x2").without("server:4", "server:0")
    assert owners(fabric, 0) == (3, 6, 1, 7, 2, 5, 8)
    assert owners(fabric, 1) == (1, 2, 3, 5, 6, 7, 8)
    forest = plan(fabric, "detour").forest
    assert forest.root.tolist() == [*owners(fabric, 0), *owners(fabric, 1)]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_last_live_neighbour_stands_in_whatever_the_column(last):
    dead = [f"server:{server}" for server in range(4) if server != last]
    fabric = parse("bcube:4x2").without(*dead)
    assert [stand_in(fabric, 0, 0, column) for column in (1, 2, 3)] == [last] * 3


def test_stand_ins_pass_over_the_dead_and_prefer_a_live_nic():
    fabric = parse("bcube:4x2").without("server:0")
    assert [stand_in(fabric, 0, 0, column) for column in (1, 2, 3)] == [1, 2, 3]
    assert [stand_in(fabric, 0, 1, column) for column in (1, 2, 3)] == [4, 8, 12]
    assert stand_in(fabric.without("server:2"), 0, 0, 2) == 3
    assert stand_in(fabric.without("server:3"), 0, 0, 3) == 1
    assert stand_in(fabric.without("link:1/0"), 0, 0, 1) == 2
    assert stand_in(fabric.without("switch:0/0"), 0, 0, 1) == 1
    with pytest.raises(FabricError, match="all neighbours of server 0 at level 0"):
        stand_in(fabric.without("server:1", "server:2", "server:3"), 0, 0, 1)


def test_shortest_paths_avoid_the_dead():
    fabric = parse("bcube:3x2")
    assert shortest_paths(fabric, 0, 4) == (((0, 0, 1), (1, 1, 4)), ((0, 1, 3), (3, 0, 4)))
    assert shortest_paths(fabric.without("server:1"), 0, 4) == (((0, 1, 3), (3, 0, 4)),)
    assert len(shortest_paths(fabric.without("link:0/0"), 0, 1)) == 2
    with pytest.raises(FabricError, match="no live path joins servers 0 and 4"):
        shortest_paths(fabric.without("link:4/0", "link:4/1"), 0, 4)
    with pytest.raises(FabricError, match="no live path"):
        shortest_paths(fabric.without("server:4"), 0, 4)


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:4x3", "torus:8x2", "graph:0-1-2,3-4-5;0-3,1-4,2-5"])
def test_shortest_paths_and_parts_are_those_of_networkx(name):
    chance, whole = random.Random(name), parse(name)
    for _ in range(10):
        servers = [f"server:{each}" for each in range(whole.n_servers) if chance.random() < 0.08]
        links = [f"link:{server}/{level}" for server, level in whole.links if chance.random() < 0.1]
        fabric = whole.without(*servers, *links)
        graph = fabric.graph()
        parts = [{each for each in part if isinstance(each, int)} for part in nx.connected_components(graph)]
        assert sorted(map(sorted, filter(None, parts))) == sorted(map(list, fabric.components()))
        source, target = chance.sample(range(whole.n_servers), 2)
        if any({source, target} <= part for part in parts):
            found = nx.all_shortest_paths(graph, source, target)
            wanted = {tuple(zip(nodes[:-1:2], nodes[1::2], nodes[2::2], strict=True)) for nodes in found}
            paths = shortest_paths(fabric, source, target)
            assert len(set(paths)) == min(len(wanted), MAX_CHOICES)
            assert {tuple((a, (i, fabric.group(a, i)), b) for a, i, b in path) for path in paths} <= wanted
        else:
            with pytest.raises(FabricError, match="no live path"):
                shortest_paths(fabric, source, target)


@pytest.mark.slow
def test_every_single_failure_of_3x2_and_2x3_gives_right_sums():
    for name in ("bcube:3x2", "bcube:2x3"):
        healthy = parse(name)
        failures = [f"server:{server}" for server in healthy.servers]
        failures += [f"link:{server}/{level}" for server, level in healthy.links]
        failures += [f"switch:{level}/{group}" for level, group in healthy.switches]
        for failure in failures:
            made = plan(healthy.without(failure), "detour")
            assert verify(made.forest, made.fabric) == []
            programs = {server: made.program(server) for server in made.fabric.servers}
            check_sums(made.fabric, programs, n_elements=97)


@st.composite
def damaged(draw):
    """A small fabric with up to six failures of any kind, connected or not."""
    healthy = parse(draw(st.sampled_from(["bcube:2x2", "bcube:3x2", "bcube:4x2", "bcube:2x3", "bcube:3x3"])))
    servers = st.sampled_from(healthy.servers).map(lambda server: f"server:{server}")
    links = st.sampled_from(healthy.links).map(lambda link: f"link:{link[0]}/{link[1]}")
    switches = st.sampled_from(healthy.switches).map(lambda switch: f"switch:{switch[0]}/{switch[1]}")
    return healthy.without(*draw(st.lists(st.one_of(servers, links, switches), max_size=6)))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("n_examples", [50, 150])
def test_random_damage_gives_right_sums_or_names_the_parts(n_examples):
    drawn = given(fabric=damaged(), n_elements=st.integers(0, 200), seed=st.integers(0, 99))
    settings(max_examples=n_examples, deadline=None, derandomize=True)(drawn(right_sums_or_the_parts))()


def right_sums_or_the_parts(fabric, n_elements, seed):
    if not fabric.is_connected:
        with pytest.raises(FabricError, match=r"fall into parts|no server"):
            plan(fabric, "detour")
        return
    made = plan(fabric, "detour")
    assert verify(made.forest, fabric) == []
    assert gst_staged(made.forest, fabric) >= gst(made.forest, fabric) >= bound(fabric)
    programs = {server: made.program(server) for server in fabric.servers}
    check_sums(fabric, programs, n_elements, seed)


def test_a_whole_group_may_die():
    forest, fabric = forest_of("bcube:3x2", "server:0", "server:1", "server:2")
    assert forest.pieces == 12
    assert gst(forest, fabric) >= bound(fabric)


def test_one_survivor_has_nothing_to_send():
    forest, fabric = forest_of("bcube:2x2", "server:0", "server:1", "server:2")
    assert forest.root.tolist() == [3, 3]
    assert gst(forest, fabric) == 0 == bound(fabric)
