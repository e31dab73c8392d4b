"""Servers that exchange much live behind one switch, where the racks of machines are known."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import bml
from bml.cluster.fleets.placement import Machine
from bml.cluster.fleets.racks import Racks, crossing, in_racks
from bml.errors import UsageError
from bml.topology import Fabric, parse


def cluster(*sizes: int, seed: int = 0) -> tuple[list[Machine], Racks]:
    """Machines in racks of these sizes, whose addresses say nothing about their racks."""
    addresses = [f"10.0.0.{i:03}" for i in range(sum(sizes))]
    random.Random(seed).shuffle(addresses)
    machines = [Machine(each, f"node-{each}", 4.0) for each in addresses]
    at, of = 0, dict[str, str]()
    for rack, size in enumerate(sizes):
        of |= dict.fromkeys(addresses[at : at + size], f"rack-{rack}")
        at += size
    return machines, Racks(of)


def splits(servers: Sequence[int], sizes: Sequence[int]) -> Iterator[list[set[int]]]:
    """All ways to split servers into parts of these sizes."""
    from itertools import combinations

    if not sizes:
        yield []
        return
    for part in combinations(servers, sizes[0]):
        for others in splits([each for each in servers if each not in part], sizes[1:]):
            yield [set(part), *others]


def least(fabric: Fabric, sizes: Sequence[int]) -> int:
    """The fewest links that cross racks with one server on each machine, by trying all ways."""
    pairs = [
        (one, other)
        for one in fabric.servers
        for level in range(fabric.levels)
        for other in fabric.neighbours(one, level)
        if one < other
    ]
    return min(
        sum(not any({one, other} <= part for part in parts) for one, other in pairs)
        for parts in splits(fabric.servers, sizes)
    )


CASES = [
    ("bcube:2x2", (2, 2)),
    ("bcube:2x2", (1, 3)),
    ("bcube:2x3", (4, 4)),
    ("bcube:2x3", (3, 5)),
    ("bcube:2x3", (2, 2, 4)),
    ("bcube:2x3", (3, 3, 2)),
    ("bcube:3x2", (3, 3, 3)),
    ("bcube:3x2", (4, 5)),
    ("bcube:3x2", (6, 2, 1)),
    ("torus:3x2", (3, 3, 3)),
    ("torus:3x2", (4, 3, 2)),
    ("bcube:4x1", (2, 2)),
]


@pytest.mark.parametrize(("fabric", "sizes"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_fewest_links_that_can_be_cross_racks(fabric: str, sizes: tuple[int, ...], seed: int) -> None:
    healthy = parse(fabric)
    machines, racks = cluster(*sizes, seed=seed)
    homes = in_racks(healthy, healthy.servers, machines, racks)
    assert sorted(homes.values()) == sorted(each.node for each in machines), "one server on each machine"
    assert crossing(healthy, homes, machines, racks)[0] == least(healthy, sizes)


@pytest.mark.parametrize("seed", range(30))
def test_as_many_on_each_machine_and_fewer_links_cross_than_by_chance(seed: int) -> None:
    draw = random.Random(seed)
    fabric = parse(draw.choice(["bcube:3x2", "bcube:4x2", "torus:4x2", "bcube:2x4"]))
    machines, racks = cluster(*[draw.randint(1, 5) for _ in range(draw.randint(1, 4))], seed=seed)
    homes = in_racks(fabric, fabric.servers, machines, racks)
    counts = [list(homes.values()).count(each.node) for each in machines]
    used = [count for count in counts if count]
    assert sorted(homes) == list(fabric.servers)
    assert len(used) == min(len(machines), fabric.n_servers)
    assert max(used) - min(used) <= 1
    nodes = [homes[server] for server in fabric.servers]
    crossed, links = crossing(fabric, homes, machines, racks)
    assert 0 <= crossed <= links
    for _ in range(5):
        draw.shuffle(nodes)
        by_chance = dict(zip(fabric.servers, nodes, strict=True))
        assert crossed <= crossing(fabric, by_chance, machines, racks)[0]


def test_neighbours_share_a_machine_within_a_rack() -> None:
    fabric = parse("bcube:2x3")
    machines, racks = cluster(2, 2)
    homes = in_racks(fabric, fabric.servers, machines, racks)
    each_its_own = Racks({each.address: each.address for each in machines})
    assert crossing(fabric, homes, machines, racks) == (4, 12)
    assert crossing(fabric, homes, machines, each_its_own) == (8, 12), "two of eight neighbours on each"


def test_a_large_fabric_takes_a_moment() -> None:
    fabric = parse("bcube:8x2")
    machines, racks = cluster(*[8] * 8)
    homes = in_racks(fabric, fabric.servers, machines, racks)
    assert crossing(fabric, homes, machines, racks) == (8 * 28, 16 * 28), "one level is inside of the racks"


@pytest.mark.parametrize(
    "text",
    [
        "rack-1: [10.0.0.1, node-b]\nrack-2: [10.0.0.3]",
        '{"rack-1": ["10.0.0.1", "node-b"], "rack-2": ["10.0.0.3"]}',
    ],
)
def test_a_topology_names_machines_by_address_or_host(text: str) -> None:
    racks = Racks.load(text)
    one, two = Machine("10.0.0.1", "a", 4.0, host="node-a"), Machine("10.0.0.2", "b", 4.0, host="node-b")
    new = Machine("10.0.0.9", "c", 4.0)
    assert (racks.rack(one), racks.rack(two)) == ("rack-1", "rack-1")
    assert racks.rack(new) == "the rack of 10.0.0.9"
    racks.check([one, two])
    with pytest.raises(
        UsageError, match=r"in no rack .*: 10\.0\.0\.9 \(no host name\); it names 10\.0\.0\.1"
    ):
        racks.check([one, new])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a topology has racks, and this is None"),
        ("- a", "a topology has racks"),
        ("rack: {", "neither YAML nor JSON"),
        ("rack: 10.0.0.1", "the machines of rack 'rack' are '10.0.0.1': write a rack"),
        ("rack: []", "the machines of rack 'rack'"),
        ("rack: [10]", "the machines of rack 'rack'"),
        ("a: [m]\nb: [m]", "machine m is in rack 'a' and in 'b'"),
    ],
)
def test_a_file_that_is_no_topology_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Racks.load(text)


def test_a_topology_is_of_a_ray_cluster(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a topology is that of a Ray cluster"):
        bml.launch(print, "bcube:2x1", launcher="processes", topology={"a": ["10.0.0.1"]})
    with pytest.raises(UsageError, match=r"racks\.yaml cannot be read: .*No such file"):
        bml.launch(print, "bcube:2x1", topology=tmp_path / "racks.yaml")
    with pytest.raises(UsageError, match="write a rack"):
        bml.launch(print, "bcube:2x1", topology={"a": "10.0.0.1"})
