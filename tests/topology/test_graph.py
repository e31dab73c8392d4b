"""Any graph as a fabric: its notation, files, levels, routes, and what is wrong with those that cannot be."""

from __future__ import annotations

import json
import pickle
import random
from fractions import Fraction
from pathlib import Path

import networkx as nx
import pytest

from bml.schedule import plan, prove
from bml.topology import Fabric, UsageError, bcube, parse, torus
from bml.topology.graph import MOST_SERVERS, of_switches
from bml.topology.graph_file import graph_of


def wired(fabric: Fabric) -> set[frozenset[int]]:
    """The servers of each switch."""
    return {frozenset(fabric.members(level, group)) for level, group in fabric.switches}


def drawn(seed: int) -> Fabric:
    """A connected graph of switches and cables, drawn at random."""
    chance = random.Random(seed)
    n = chance.randint(3, 14)
    tree = [[server, chance.randrange(server)] for server in range(1, n)]
    more = [chance.sample(range(n), chance.randint(2, min(5, n))) for _ in range(chance.randint(0, n))]
    rate = chance.choice(["", "2/5"])
    return of_switches([[(server, rate) for server in switch] for switch in tree + more])


@pytest.mark.parametrize("seed", range(60))
def test_a_graph_has_one_nic_a_level_its_name_says_all_and_routes_are_shortest(seed: int) -> None:
    fabric = drawn(seed)
    assert parse(fabric.name) == fabric
    assert parse(fabric.name).rates == fabric.rates
    assert pickle.loads(pickle.dumps(fabric)) == fabric
    for level in range(fabric.levels):
        at = [
            server
            for group in range(fabric.wiring.n_groups(level))
            for server in fabric.members(level, group)
        ]
        assert len(at) == len(set(at))
    hops = nx.Graph()
    for switch in wired(fabric):
        hops.add_edges_from((a, b) for a in switch for b in switch if a < b)
    chance = random.Random(seed)
    for _ in range(10):
        a, b = chance.choices(range(fabric.n_servers), k=2)
        for turn in range(3):
            route = fabric.route(a, b, turn)
            assert len(route) == nx.shortest_path_length(hops, a, b)
            at = a
            for source, level, to in route:
                assert source == at
                assert to in fabric.neighbours(source, level)
                at = to
            assert at == b


HUBS = ("graph:0-1;0-2;0-3;0-4", "graph:0-1,2-3;1-2,0-3;0-2", "graph:0-1-2,3-4-5;0-3", "graph:0-1,1-2,2-0")


@pytest.mark.parametrize("name", [*HUBS, *(drawn(seed).name for seed in range(8))])
def test_auto_works_for_every_size_and_is_near_the_optimum_for_large_ones(name: str) -> None:
    """Where server 0 is everyone's neighbour, that says nothing of the others."""
    fabric = parse(name)
    for nbytes in (4, 100, 10_000, 1_000_000):
        assert plan(fabric, "auto", nbytes).violations() == []
    assert plan(fabric).gst() <= prove(fabric).value * Fraction(105, 100)


@pytest.mark.parametrize("seed", range(12))
def test_plans_on_any_graph_are_near_the_proved_optimum(seed: int) -> None:
    fabric = drawn(seed)
    made = plan(fabric, "packed")
    assert prove(fabric).value <= made.gst() <= prove(fabric).value * Fraction(105, 100)


def test_known_fabrics_written_as_graphs_are_planned_alike() -> None:
    for known in (bcube(3, 2), torus(3, 2), torus(4, 2)):
        switches = [[(s, "") for s in known.members(level, group)] for level, group in known.switches]
        made = of_switches(switches)
        assert wired(made) == wired(known)
        assert prove(made).value == prove(known).value
        assert made.levels <= known.levels


def test_levels_may_be_written() -> None:
    fabric = parse("graph:0-1-2,3-4-5;0-3,1-4,2-5")
    assert (fabric.n_servers, fabric.levels, fabric.ports) == (6, 2, 3)
    assert fabric.name == "graph:0-1-2,3-4-5;0-3,1-4,2-5"
    assert fabric.group(4, 0) == 1
    assert fabric.members(1, 1) == (1, 4)
    assert parse("graph:0-1;0-1").levels == 2, "two cables"


def test_rates_are_part_of_the_name() -> None:
    fabric = parse("graph:0-1*2/5,1-2")
    assert fabric.rate(1, 0) == Fraction(2, 5)
    assert fabric.name == "graph:0-1*2/5;1-2"
    assert parse(fabric.name).rates == fabric.rates


def test_long_rates_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"edges": [[0, 1, 3.3333333333333335e-10]]}')
    fabric = parse(f"graph:{tmp_path / 'a.json'}")
    assert parse(fabric.name).rates == fabric.rates


LINES = """# four servers
0 rack
1 rack   # of this one
2,rack,0.5
2 3 2/5
"""


def test_files_say_the_same_in_every_form(tmp_path: Path) -> None:
    edges = [(0, "rack", None), (1, "rack", None), (2, "rack", "0.5"), (2, 3, "2/5")]
    network = nx.MultiGraph()
    for a, b, capacity in edges:
        network.add_edge(str(a), str(b), **({"capacity": capacity} if capacity else {}))
    (tmp_path / "edges.txt").write_text(LINES)
    (tmp_path / "edges.json").write_text(
        json.dumps({"edges": [[*e[:2], *([e[2]] if e[2] else [])] for e in edges]})
    )
    (tmp_path / "links.json").write_text(json.dumps(nx.node_link_data(network, edges="links")))
    nx.write_graphml(network, tmp_path / "net.graphml")
    found = {
        parse(f"graph:{tmp_path / name}").name
        for name in ("edges.txt", "edges.json", "links.json", "net.graphml")
    }
    assert found == {"graph:0-1-2*1/2;2*2/5-3*2/5"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-1,2-3", "falls apart: servers [0, 1] do not reach servers [2, 3]"),
        ("0-0", "server 0 is on one switch twice"),
        ("0-1,2", "joins server 2 alone"),
        ("1-2", "server 0 is missing"),
        ("0-1*0", "write a positive exact number"),
        ("0-1*-1", "cannot be read"),
        ("0-1,1-2;0-2,2-1", "server 1 is on two switches of level 0"),
        (f"0-{MOST_SERVERS}", "too large"),
        (",".join(f"0-{server}" for server in range(1, 4000)), "server 0 has 3999 NICs, 64 are the most"),
        ("no-such-file", "cannot be read: No such file"),
        ("/", "is no file"),
        ("/dev/zero", "is no file"),
        ("a\0b", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_notation(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(f"graph:{text}")
    assert said in str(error.value)


GRAPHML = (
    '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected">{}'
    '<node id="0"/><node id="1"/><edge source="0" target="1"/></graph></graphml>'
)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16"])
def test_graphml_says_how_it_is_encoded(tmp_path: Path, encoding: str) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?>' + GRAPHML.format(
        '<node id="Büro"/><edge source="0" target="Büro"/><edge source="1" target="Büro"/>'
    )
    (tmp_path / "a.graphml").write_bytes(text.encode(encoding))
    assert parse(f"graph:{tmp_path / 'a.graphml'}").name == "graph:0-1;0-1"


def test_rates_of_both_ways_are_compared_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"directed": true, "edges": [[0, 1, "1/2"], [1, 0, 0.5], [1, 2], [2, 1, 1]]}'
    )
    assert parse(f"graph:{tmp_path / 'a.json'}").name == "graph:0*1/2-1*1/2;1-2"


@pytest.mark.parametrize("rate", ["2", "0.4", "2/5"])
def test_rates_that_a_message_recommends_are_taken(tmp_path: Path, rate: str) -> None:
    (tmp_path / "a.txt").write_text(f"0 1 {rate}")
    assert graph_of(str(tmp_path / "a.txt")).rate(0, 0) == Fraction(rate)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "", "needs servers"),
        ("a.txt", "0 1 2 3", "line 1, '0 1 2 3': write two nodes and perhaps a rate such as 2, 0.4 or 2/5"),
        ("a.txt", "0 1 -2", "write a positive exact number such as 2, 0.4 or 2/5, of at most 30 digits"),
        ("a.txt", "0 1 '0.4'", "write a positive exact number such as 2, 0.4 or 2/5, of at most 30 digits"),
        ("a.txt", "0 1 fast", "write a positive exact number"),
        ("a.txt", "0 a\n1 a\na b\n2 b", "switches a and b are joined"),
        ("a.txt", "0 a\n0 a\n1 a", "server 0 is on one switch twice"),
        ("a.txt", "0 0", "joins server 0 with itself"),
        ("a.txt", "0 1\n1 a", "switch a joins server 1 alone"),
        ("a.txt", "0 1\n2 3", "falls apart"),
        ("a.json", "{", "it is no JSON"),
        ("a.json", "[" * 100_000, "it is no JSON"),
        ("a.json", "[]", 'has a list "edges"'),
        ("a.json", '{"edges": [[0]]}', "[0] is no edge: write [node, node, rate]"),
        ("a.json", '{"edges": [[0, 1.5]]}', "1.5 is no node"),
        ("a.json", '{"edges": [[0, 1, null]]}', "None is no rate"),
        ("a.json", '{"edges": [[0, 1, 0]]}', "write a positive exact number"),
        ("a.json", '{"edges": [[0, 1, 1e999]]}', "write a positive exact number"),
        ("a.json", '{"nodes": [{"id": 0}, {"id": 7}, {"id": 1}], "links": [[0, 1]]}', "node 7 has no edge"),
        ("a.json", '{"nodes": [0, 1, "rack"], "links": [[0, 1]]}', "node rack has no edge"),
        ("a.json", '{"nodes": 3, "edges": [[0, 1]]}', '"nodes" of JSON is a list'),
        (
            "a.json",
            '{"directed": true, "edges": [[0, 1, 2], [1, 0, 1]]}',
            "the cable from 0 to 1 has the rate 2 and back 1: give both ways one",
        ),
        ("a.txt", "0 1234567\n1 1234567", "node 1234567 is a whole number, and so a server"),
        ("a.txt", "n0 n1", "if these are servers, number them 0, 1, 2, ..."),
        ("a.txt", '"0","1"', "if these are servers, number them 0, 1, 2, ..."),
        ("a.graphml", GRAPHML.format('<node id="7"/>'), "node 7 has no edge"),
        (
            "a.graphml",
            GRAPHML.format("").replace("</graphml>", "<graph/></graphml>"),
            "it has 2 graphs: give one",
        ),
        ("a.graphml", "<graphml>", "it is no GraphML"),
        ("a.graphml", "0 1", "it is no GraphML"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as error:
        graph_of(str(tmp_path / name))
    assert said in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf0 1\n1 2\n")
    assert parse(f"graph:{tmp_path / 'a'}").n_servers == 3


def test_a_directed_graph_has_each_cable_once(tmp_path: Path) -> None:
    network = nx.DiGraph([("0", "1"), ("1", "0"), ("1", "rack"), ("rack", "1"), ("2", "rack"), ("0", "2")])
    nx.write_graphml(network, tmp_path / "a.graphml")
    (tmp_path / "a.json").write_text(json.dumps(nx.node_link_data(network, edges="edges")))
    for name in ("a.graphml", "a.json"):
        assert wired(parse(f"graph:{tmp_path / name}")) == {
            frozenset(pair) for pair in ((0, 1), (1, 2), (0, 2))
        }


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no text"):
        graph_of(str(tmp_path / "a"))
