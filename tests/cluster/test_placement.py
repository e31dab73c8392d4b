"""Where servers live on a Ray cluster."""

from __future__ import annotations

import random

import pytest

import bml
from bml.cluster.fleets.placement import Machine, Reservation, blocks, home_for
from bml.errors import StartError, UsageError


def machines(*cpus: float) -> list[Machine]:
    return [Machine(f"10.0.0.{i}", f"node{i}", each) for i, each in enumerate(cpus)]


def test_neighbours_live_together() -> None:
    where = blocks(range(9), machines(8, 8, 8))
    assert [where[server] for server in range(9)] == ["node0"] * 3 + ["node1"] * 3 + ["node2"] * 3


def test_a_head_without_processors_gets_no_server_unless_it_is_alone() -> None:
    assert set(blocks(range(4), machines(0, 2, 2)).values()) == {"node1", "node2"}
    assert set(blocks(range(4), machines(0)).values()) == {"node0"}


@pytest.mark.parametrize("seed", range(50))
def test_as_many_on_each_machine_give_or_take_one(seed: int) -> None:
    draw = random.Random(seed)
    servers, nodes = range(draw.randint(1, 40)), machines(*[4.0] * draw.randint(1, 50))
    draw.shuffle(nodes)
    where = blocks(servers, nodes)
    assert sorted(where) == list(servers)
    counts = [list(where.values()).count(node.node) for node in nodes]
    used = [count for count in counts if count]
    assert len(used) == min(len(servers), len(nodes))
    assert max(used) - min(used) <= 1
    moves = sum(where[one] != where[one + 1] for one in servers[:-1])
    assert moves == len(used) - 1, "neighbours live together"


def test_a_server_whose_machine_is_gone_goes_where_the_fewest_are() -> None:
    def home(homes: dict[int, str], there: list[Machine], racks: str = "") -> str:
        return home_for(4, homes, there, lambda each: racks[int(each.node[-1])] if racks else each.node)

    homes = {0: "node0", 1: "node0", 2: "node1", 3: "node1", 4: "gone"}
    assert home(homes, machines(4, 4, 4)) == "node2", "a machine that has come since"
    assert home(homes, machines(4, 4)) == "node1", "its neighbours are there"
    assert home({**homes, 3: "gone"}, machines(4, 4)) == "node1", "the fewest are there"
    assert home(homes, machines(0, 0, 4)) == "node2", "the others offer no processors"
    assert home(homes, machines(4, 4, 4, 4), "abab") == "node3", "its neighbours are in that rack"
    with pytest.raises(StartError, match="no Ray node is there for server 4"):
        home(homes, [])


def test_a_reservation_is_read_and_handed_to_ray() -> None:
    wanted = Reservation.parse(["GPU=1", "CPU=2.5", "rdma=1"])
    assert wanted.options == {"num_cpus": 2.5, "num_gpus": 1.0, "resources": {"rdma": 1.0}}
    assert str(wanted) == "GPU=1, CPU=2.5, rdma=1"
    nothing = Reservation()
    assert not nothing
    assert nothing.options == {"num_cpus": 0, "num_gpus": 0, "resources": {}}


@pytest.mark.parametrize("text", ["GPU", "GPU=", "GPU=two", "=1", "GPU=0", "GPU=-1", "GPU=inf", "GPU=nan"])
def test_what_reserves_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="GPU=1"):
        Reservation.parse([text])


@pytest.mark.parametrize("amount", ["one", None, 0, float("nan")])
def test_a_job_with_amounts_that_are_none_is_refused_before_anything_starts(amount: object) -> None:
    with pytest.raises(UsageError, match="GPU=1"):
        bml.launch(print, "bcube:2x1", resources={"GPU": amount})


def test_only_of_a_ray_cluster_something_is_reserved() -> None:
    with pytest.raises(UsageError, match="resources are reserved of a Ray cluster"):
        bml.launch(print, "bcube:2x1", launcher="processes", resources={"CPU": 1})
