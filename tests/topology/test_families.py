"""Torus, Fat-Tree and one big switch as wired, their routes, and rates of single links."""

import pickle
import random
from collections import Counter
from fractions import Fraction

import networkx as nx
import pytest

from bml.topology import FatTree, Torus, UsageError, bcube, big_switch, fat_tree, parse, torus

TORI = [
    "torus:2x1",
    "torus:3x1",
    "torus:2x2",
    "torus:3x2",
    "torus:4x2",
    "torus:5x2",
    "torus:2x3",
    "torus:3x3",
]


@pytest.mark.parametrize("name", TORI)
def test_cables_of_a_torus_join_neighbours_of_one_coordinate(name):
    fabric = parse(name)
    wiring = fabric.wiring
    assert isinstance(wiring, Torus)
    n, h = wiring.size, wiring.dimensions
    assert len(fabric.switches) == h * n**h
    assert len(fabric.links) == 2 * h * n**h
    for level, group in fabric.switches:
        low, high = fabric.members(level, group)
        assert fabric.group(low, level) == fabric.group(high, level) == group
        differences = [
            (b - a) % n for a, b in zip(fabric.address(low), fabric.address(high), strict=True) if a != b
        ]
        assert differences in ([1], [n - 1])
    assert fabric.is_connected
    assert all(fabric.server_at(fabric.address(server)) == server for server in fabric.servers)


def test_a_4x2_torus_is_coloured_even_and_odd():
    fabric = torus(4, 2)
    assert (fabric.levels, fabric.ports, fabric.n_servers) == (4, 2, 16)
    assert [fabric.neighbours(0, level) for level in range(4)] == [(1,), (3,), (4,), (12,)]
    assert [fabric.neighbours(1, level) for level in range(4)] == [(0,), (2,), (5,), (13,)]
    assert fabric.without("switch:0/0").neighbours(0, 0) == ()


def test_an_odd_ring_closes_with_a_third_colour():
    fabric = torus(3, 1)
    assert [fabric.group(server, 2) for server in range(3)] == [0, -1, 0]
    assert fabric.neighbours(0, 2) == (2,)
    assert fabric.neighbours(1, 2) == ()
    assert not fabric.nic_alive(1, 2)
    with pytest.raises(
        UsageError, match=r"server 1 of torus:3x1 has no NIC of level 2: its levels are \[0, 1\]"
    ):
        fabric.without("link:1/2")


@pytest.mark.parametrize("name", [*TORI, "bcube:3x2", "bcube:2x3", "switch:5", "fattree:4"])
def test_routes_are_shortest_paths_over_what_is_wired(name):
    fabric = parse(name)
    distance = dict(nx.all_pairs_shortest_path_length(fabric.graph()))
    for source in fabric.servers:
        for target in fabric.servers:
            for turn in (0, 1):
                route = fabric.route(source, target, turn)
                assert 2 * len(route) == distance[source][target]
                at = source
                for sender, level, receiver in route:
                    assert sender == at
                    assert receiver in fabric.neighbours(sender, level)
                    at = receiver
                assert at == target


def test_half_way_round_the_turn_decides():
    fabric = torus(4, 1)
    assert [hop[2] for hop in fabric.route(0, 2, 0)] == [1, 2]
    assert [hop[2] for hop in fabric.route(0, 2, 1)] == [3, 2]
    assert [hop[1] for hop in bcube(3, 2).route(0, 4, 1)] == [1, 0]


def test_a_fat_tree_has_the_papers_numbers():
    fabric = fat_tree(10)
    assert (fabric.name, fabric.n_servers, fabric.levels) == ("fattree:10", 250, 1)
    assert parse("fattree:10/250") == fabric
    assert parse("fattree:4/6").name == "fattree:4/6"
    assert fabric.address(249) == (4, 4, 9)
    assert fabric.server_at((4, 4, 9)) == 249
    assert len(fabric.neighbours(0, 0)) == 249
    with pytest.raises(UsageError, match=r"takes \(place, edge switch, pod\)"):
        fabric.server_at((5, 0, 0))
    nodes = {
        node
        for s in range(0, 250, 5)
        for t in fabric.servers
        for link in fabric.inner_path(s, t)
        for node in link
    }
    assert Counter(layer for layer, _ in nodes) == {0: 50, 1: 50, 2: 25}


def test_ecmp_paths_go_up_and_down_and_depend_on_flow_and_seed():
    fabric = fat_tree(4)
    assert fabric.inner_path(0, 1) == ()
    same_pod = fabric.inner_path(0, 2)
    assert [link[0][0] for link in same_pod] == [0, 1]
    across = fabric.inner_path(0, 15)
    assert [layer for link in across for layer in (link[0][0], link[1][0])] == [0, 1, 1, 2, 2, 1, 1, 0]
    assert across[0][0] == (0, 0)
    assert across[-1][1] == (0, 7)
    assert fabric.inner_path(0, 15) == across
    assert len({fabric.inner_path(0, 15, flow) for flow in range(64)}) == 4
    assert len({fat_tree(4, seed=seed).inner_path(0, 15) for seed in range(64)}) == 4
    # A core switch belongs to one plane: it is reached over the same aggregation switch in every pod.
    for flow in range(16):
        (_, up), (_, core), (_, down), _ = fabric.inner_path(0, 15, flow)
        assert up[1] % 2 == down[1] % 2 == core[1] // 2


def test_one_big_switch():
    fabric = big_switch(9)
    assert (fabric.name, fabric.levels, fabric.ports) == ("switch:9", 1, 9)
    assert fabric.neighbours(4, 0) == (0, 1, 2, 3, 5, 6, 7, 8)
    assert fabric.server_at((3,)) == 3
    assert not fabric.without("switch:0/0").is_connected
    with pytest.raises(UsageError, match="is no address of switch:9"):
        fabric.server_at((9,))


def test_rates_are_exact_and_part_of_the_value():
    fabric = bcube(3, 2).with_rates({(4, 0): "0.4", (0, 1): 2})
    assert (fabric.rate(4, 0), fabric.rate(0, 1), fabric.rate(1, 1)) == (Fraction(2, 5), 2, 1)
    assert fabric != bcube(3, 2)
    assert fabric.with_rates({(4, 0): 1, (0, 1): 1}) == bcube(3, 2)
    assert fabric.without("server:8").rate(4, 0) == Fraction(2, 5)
    assert pickle.loads(pickle.dumps(fabric)) == fabric
    assert hash(fabric) == hash(bcube(3, 2).with_rates({(0, 1): 2, (4, 0): Fraction(2, 5)}))
    assert str(fabric.without("server:8")) == "bcube:3x2 with 2 link(s) of other rates without server:8"


@pytest.mark.parametrize(
    ("rate", "possible"),
    [
        *((given, r"2, '0\.4' or Fraction\(2, 5\)") for given in (0, -1, 0.5)),
        *((given, "2, 0.4 or 2/5") for given in ("fast", "1/0", "0")),
    ],
)
def test_rates_that_are_none(rate, possible):
    with pytest.raises(UsageError, match=f"write a positive exact number such as {possible}, of at most"):
        bcube(3, 2).with_rates({(0, 0): rate})


def test_rates_of_links_that_do_not_exist():
    with pytest.raises(UsageError, match="there is no server 9"):
        bcube(3, 2).with_rates({(9, 0): 2})
    with pytest.raises(UsageError, match="has no NIC of level 2"):
        torus(3, 1).with_rates({(1, 2): 2})


def test_families_are_told_apart_by_their_wiring():
    assert isinstance(fat_tree(4).wiring, FatTree)
    assert [
        parse(name).wiring.is_product for name in ("bcube:3x2", "torus:4x2", "switch:9", "fattree:4")
    ] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3", "torus:4x2", "torus:5x1", "switch:4"])
def test_connected_means_one_component(name):
    fabric = parse(name)
    chance = random.Random(name)
    found = []
    for _ in range(40):
        damaged = fabric.without(*(f"link:{s}/{level}" for s, level in fabric.links if chance.random() < 0.3))
        damaged = damaged.without(*(f"server:{s}" for s in fabric.servers if chance.random() < 0.2))
        found.append(damaged.is_connected)
        assert damaged.is_connected == (len(damaged.components()) == 1)
    assert len(set(found)) == 2
