"""BCube as wired, and what is left of it when parts die."""

import pickle

import networkx as nx
import pytest

import bml.topology as topology
from bml.topology import SwitchFailure, UsageError, bcube, parse


def test_ids_are_digits_lowest_first():
    fabric = bcube(3, 2)
    assert (fabric.name, fabric.n_servers, fabric.levels, fabric.ports) == ("bcube:3x2", 9, 2, 3)
    assert fabric.address(5) == (2, 1)
    assert fabric.server_at((2, 1)) == 5
    assert all(fabric.server_at(fabric.address(server)) == server for server in fabric.servers)


def test_groups_are_the_other_digits_lowest_first():
    fabric = bcube(2, 3)
    # Server 6 is (0, 1, 1): without a_0 the digits 1, 1 read 3; without a_1 the digits 0, 1 read 2.
    assert [fabric.group(6, level) for level in range(3)] == [3, 2, 2]
    assert fabric.members(1, 2) == (4, 6)
    assert bcube(3, 2).members(0, 2) == (6, 7, 8)
    assert bcube(3, 2).members(1, 2) == (2, 5, 8)


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:4x2", "bcube:2x4", "bcube:5x1", "bcube:3x3"])
def test_switches_join_servers_that_differ_in_one_digit(name):
    fabric = parse(name)
    n, k = fabric.ports, fabric.levels
    assert len(fabric.switches) == k * n ** (k - 1)
    assert len(fabric.links) == k * n**k
    for level, group in fabric.switches:
        members = fabric.members(level, group)
        assert members == fabric.attached(level, group)
        assert len(members) == n
        addresses = [list(fabric.address(server)) for server in members]
        assert sorted(address.pop(level) for address in addresses) == list(range(n))
        assert all(address == addresses[0] for address in addresses)
        assert all(fabric.group(server, level) == group for server in members)
        assert (fabric.groups[list(members), level] == group).all()


def test_neighbours_of_a_healthy_fabric():
    assert bcube(3, 2).neighbours(4, 0) == (3, 5)
    assert bcube(3, 2).neighbours(4, 1) == (1, 7)


def test_a_dead_server_takes_its_links():
    fabric = bcube(3, 2).without("server:4")
    assert fabric.servers == (0, 1, 2, 3, 5, 6, 7, 8)
    assert fabric.n_servers == 9
    assert not fabric.server_alive(4)
    assert not fabric.nic_alive(4, 0)
    assert fabric.neighbours(4, 0) == ()
    assert fabric.neighbours(3, 0) == (5,)
    assert fabric.members(0, 1) == (3, 4, 5)
    assert len(fabric.links) == 16
    assert fabric.is_connected


def test_a_dead_link_is_dead_from_both_sides():
    fabric = bcube(3, 2).without("link:4/0")
    assert fabric.servers == tuple(range(9))
    assert (fabric.nic_alive(4, 0), fabric.nic_alive(4, 1)) == (False, True)
    assert fabric.neighbours(4, 0) == ()
    assert fabric.neighbours(3, 0) == (5,)
    assert fabric.neighbours(4, 1) == (1, 7)


def test_a_dead_switch_is_the_failure_of_all_its_links():
    fabric = bcube(3, 2).without("switch:0/1")
    assert not fabric.switch_alive(0, 1)
    assert (0, 1) not in fabric.switches
    assert [fabric.nic_alive(server, 0) for server in range(9)] == [True] * 3 + [False] * 3 + [True] * 3
    assert fabric.neighbours(3, 0) == ()
    assert fabric.attached(0, 1) == ()


def test_a_fabric_is_a_value():
    fabric = bcube(3, 2)
    damaged = fabric.without("server:4", "link:0/1")
    assert fabric.failures == frozenset()
    assert damaged == fabric.without("link:0/1").without("server:4")
    assert hash(damaged) == hash(bcube(3, 2).without("link:0/1", "server:4"))
    assert damaged != fabric
    assert damaged.is_connected
    assert pickle.loads(pickle.dumps(damaged)) == damaged
    assert len(pickle.dumps(damaged)) < 500
    assert str(damaged) == "bcube:3x2 without server:4, link:0/1"
    assert fabric.without(SwitchFailure(1, 0)) == fabric.without("switch:1/0")
    with pytest.raises(ValueError, match="read-only"):
        fabric.nics[0, 0] = False


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("server:12", "bcube:3x2 has servers 0-8, there is no server 12"),
        ("link:9/0", "bcube:3x2 has servers 0-8, there is no server 9"),
        ("link:4/2", "bcube:3x2 has levels 0-1, there is no level 2"),
        ("switch:2/0", "bcube:3x2 has levels 0-1, there is no level 2"),
        ("switch:1/3", "bcube:3x2 has switches 1/0 to 1/2 at level 1, there is no switch 1/3"),
    ],
)
def test_failures_of_what_does_not_exist(failure, says):
    with pytest.raises(UsageError, match=says):
        bcube(3, 2).without(failure)


def test_addresses_of_what_does_not_exist():
    with pytest.raises(UsageError, match="there is no server 9"):
        bcube(3, 2).address(9)
    with pytest.raises(UsageError, match="takes 2 digits from 0 to 2"):
        bcube(3, 2).server_at((0, 3))


def test_components_largest_first():
    fabric = bcube(3, 2)
    assert fabric.components() == (tuple(range(9)),)
    cut = fabric.without("link:4/0", "link:4/1")
    assert cut.components() == ((0, 1, 2, 3, 5, 6, 7, 8), (4,))
    assert not cut.is_connected
    halves = bcube(2, 2).without("switch:1/0", "switch:1/1")
    assert halves.components() == ((0, 1), (2, 3))
    nobody = bcube(2, 1).without("server:0", "server:1")
    assert nobody.components() == ()
    assert not nobody.is_connected


def test_the_graph_has_live_servers_and_switches():
    graph = bcube(3, 2).without("server:4", "switch:0/0").graph()
    assert sum(isinstance(node, int) for node in graph) == 8
    assert graph.number_of_nodes() == 8 + 5
    # A damaged row of three servers and the dead server's two links are gone from 18.
    assert graph.number_of_edges() == 18 - 3 - 2
    assert not nx.is_connected(bcube(2, 1).without("link:0/0").graph())
    with pytest.raises(nx.NetworkXError):
        graph.add_node(99)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torus:4", "'4' in 'torus:4' is not size x dimensions"),
        ("torus:1x2", "a ring needs at least 2"),
        ("torus:4x0", "it needs at least 1"),
        ("torus:99x9", "at most 65536 are supported"),
        ("fattree:5", "an even number of ports"),
        ("fattree:4/17", "has 16 places, it cannot have 17 servers"),
        ("fattree:4x2", "is not ports of a switch, or ports/servers"),
        ("fattree:90", "at most 65536 are supported"),
        ("switch:1", "it needs 2 to 65536"),
        ("switch:x", "is not a number of servers; write it like switch:9"),
        ("bcub:3x2", "'bcub' is not a family of fabrics"),
        ("3x2", "the family and its colon are missing"),
        ("bcube:3", "'3' in 'bcube:3' is not ports x levels"),
        ("bcube:3x2x1", "is not ports x levels"),
        ("bcube:ax2", "is not ports x levels"),
        ("bcube:1x2", "a switch needs at least 2"),
        ("bcube:3x0", "a server needs at least 1 NIC"),
        ("bcube:99x9", "at most 65536 are supported"),
    ],
)
def test_other_text_is_no_fabric(text, says):
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_public_errors_have_one_root():
    assert issubclass(topology.UsageError, topology.BmlError)
    assert issubclass(topology.FabricError, topology.BmlError)


def test_4096_servers_are_cheap():
    fabric = bcube(8, 4).without("server:7", "switch:2/5")
    assert len(fabric.servers) == 4095
    # Gone are the 8 links of the switch and the 4 of the server; they have none in common.
    assert len(fabric.links) == 4 * 4096 - 8 - 4
    assert fabric.is_connected


def test_a_fabric_keeps_a_few_damaged_ones():
    """Servers ask for that of a view again and again; what they asked for long ago is dropped."""
    fabric = parse("bcube:4x2")
    first = fabric.without("server:0", "link:1/0")
    assert fabric.without("link:1/0", "server:0") is first
    for server in range(1, 16):
        assert fabric.without(f"server:{server}").failures == {topology.ServerFailure(server)}
        assert len(vars(fabric)["_damaged"]) <= 4
    vars(fabric)["_damaged"].update({frozenset([each]): first for each in range(5)})  # as threads may
    assert fabric.without("server:0", "link:1/0") == first
    assert len(vars(fabric)["_damaged"]) == 1
    with pytest.raises(UsageError):
        fabric.without("server:99")
