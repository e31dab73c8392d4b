"""The verifier sees what is wrong with a forest; a sound one of another family passes."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from schedule_executor import check_sums

from bml.schedule import BroadcastTrees, Forest, compile_program, gst, gst_staged, load, plan, verify
from bml.topology import UsageError, parse

HEALTHY = parse("bcube:3x2")
DAMAGED = HEALTHY.without("server:0")


def mutate(forest, **cells):
    """Copy a forest with single entries changed: parent={(piece, server): value}."""
    columns = {}
    for name, changes in cells.items():
        column = getattr(forest, name).copy()
        for place, value in changes.items():
            column[place] = value
        columns[name] = column
    return replace(forest, **columns)


def only(problems, says):
    assert problems
    assert any(says in problem for problem in problems), problems


def test_a_root_that_sends_on_counts_twice():
    forest = plan(HEALTHY).forest
    only(verify(mutate(forest, parent={(0, 0): 1}), HEALTHY), "piece 0 is counted twice: its root, server 0")


def test_a_missing_server():
    forest = plan(HEALTHY).forest
    only(verify(mutate(forest, parent={(4, 8): -2}), HEALTHY), "server 8 never contributes to piece 4")
    only(verify(mutate(forest, parent={(4, 8): -1}), HEALTHY), "server 8 never contributes to piece 4")


def test_a_cycle():
    forest = plan(HEALTHY).forest
    # Servers 1 and 2 send piece 0 to each other over their level-0 switch.
    broken = mutate(forest, parent={(0, 1): 2, (0, 2): 1})
    only(verify(broken, HEALTHY), "the contribution of server 1 to piece 0 goes round in a cycle")


def test_a_hop_that_no_switch_carries():
    forest = plan(HEALTHY).forest
    only(verify(mutate(forest, level={(0, 1): 1}), HEALTHY), "which are not on one switch")
    only(verify(mutate(forest, level={(0, 1): 5}), HEALTHY), "which are not on one switch")
    only(verify(mutate(forest, level={(0, 1): -1}), HEALTHY), "which are not on one switch")


@pytest.mark.parametrize("failure", ["link:1/0", "switch:0/0", "link:0/0"])
def test_a_dead_link(failure):
    only(verify(plan(HEALTHY).forest, HEALTHY.without(failure)), "of which a NIC or the switch is not alive")


def test_a_dead_server_that_takes_part():
    problems = verify(plan(HEALTHY).forest, DAMAGED)
    only(problems, "piece 0 is owned by server 0, which is not alive")
    only(problems, "dead server 0 takes part in piece 1")
    only(problems, "is a server that is not alive")
    assert any("more like this" in problem for problem in problems)


@pytest.mark.parametrize("weight", [0, -3])
def test_a_wrong_share(weight):
    forest = mutate(plan(HEALTHY).forest, weight={(7,): weight})
    only(verify(forest, HEALTHY), f"piece 7 has weight {weight}: every share must be positive")


def test_stages_in_the_wrong_order():
    forest = plan(HEALTHY).forest
    only(verify(mutate(forest, stage={(0, 3): 0}), HEALTHY), "wrong order of stages")
    only(verify(mutate(forest, stage={(0, 3): -1}), HEALTHY), "has no stage")


def test_columns_of_another_fabric():
    only(
        verify(plan(HEALTHY).forest, parse("bcube:4x2")),
        "column parent has shape (18, 9), bcube:4x2 needs (18, 16)",
    )
    forest = plan(HEALTHY).forest
    only(verify(replace(forest, weight=forest.weight[:-1]), HEALTHY), "column weight has shape (17,)")
    empty = Forest(forest.root[:0], forest.weight[:0], forest.parent[:0], forest.level[:0], forest.stage[:0])
    only(verify(empty, HEALTHY), "no pieces")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ((), "does not lead from server 1 to server 3"),
        (((1, 1, 4), (4, 0, 5)), "does not lead from server 1 to server 3"),
        (((1, 1, 4), (5, 0, 3)), "is not one connected path"),
        (((1, 1, 4), (4, 0, 5), (5, 0, 4), (4, 0, 3)), "passes a server twice"),
        (((1, 1, 99), (99, 0, 3)), "does not exist"),
        (((1, 0, 4), (4, 0, 3)), "leaves over NIC 0, the edge says NIC 1"),
        (((1, 1, 4), (4, 1, 3)), "which are not on one switch"),
    ],
)
def test_a_broken_detour(path, says):
    forest = plan(DAMAGED, "detour").forest
    assert forest.detours[0, 1] == ((1, 1, 4), (4, 0, 3))
    broken = replace(forest, detours={**forest.detours, (0, 1): path})
    only(verify(broken, DAMAGED), says)


def test_a_detour_over_a_dead_relay_and_one_of_no_edge():
    forest = plan(DAMAGED, "detour").forest
    only(verify(forest, DAMAGED.without("link:4/0")), "of which a NIC or the switch is not alive")
    stray = replace(forest, detours={**forest.detours, (0, 3): ((3, 0, 4),), (99, 3): ((3, 0, 4),)})
    only(verify(stray, DAMAGED), "detour of server 3 in piece 0 belongs to no edge of the tree")
    only(verify(stray, DAMAGED), "detour of server 3 in piece 99 belongs to no edge of the tree")


def ring(n):
    """Ring all-reduce on one switch: partials go once round to the root, the result goes on round."""
    server = np.arange(n, dtype=np.int32)[None, :]
    root = np.arange(n, dtype=np.int32)[:, None]
    distance = (server - root) % n
    at_root = distance == 0
    parent = np.where(at_root, -1, (server + 1) % n).astype(np.int32)
    source = np.where(at_root, -1, (server - 1) % n).astype(np.int32)
    level = np.where(at_root, -1, 0).astype(np.int8)
    stage = np.where(at_root, -1, distance - 1).astype(np.int16)
    broadcast = BroadcastTrees(source, level, stage)
    return Forest(root[:, 0], np.ones(n, np.int64), parent, level, stage, {}, broadcast)


def test_a_ring_has_its_own_way_down():
    fabric = parse("bcube:5x1")
    forest = ring(5)
    assert verify(forest, fabric) == []
    assert gst(forest, fabric) == Fraction(2 * 4, 5) == gst_staged(forest, fabric)
    check_sums(fabric, {server: compile_program(forest, server) for server in fabric.servers}, 33)
    broadcast = forest.broadcast
    assert broadcast is not None
    cyclic = broadcast.source.copy()
    cyclic[0, 1], cyclic[0, 2] = 2, 1
    broken = replace(forest, broadcast=replace(broadcast, source=cyclic))
    only(verify(broken, fabric), "the result of piece 0 never reaches server 1")
    missing = broadcast.source.copy()
    missing[0, 1] = -2
    broken = replace(forest, broadcast=replace(broadcast, source=missing))
    only(verify(broken, fabric), "server 1 never gets the result of piece 0")


def test_a_relayed_way_down_of_its_own():
    """In a line 0 - 1 - 2 of a ring whose third hop is relayed by server 3, down as well as up."""
    fabric = parse("bcube:4x1").without("server:3")
    parent = np.array([[-1, 0, 0, -2]], np.int32)
    level = np.array([[-1, 0, 0, -1]], np.int8)
    stage = np.array([[-1, 0, 0, -1]], np.int16)
    detour = {(0, 2): ((0, 0, 1), (1, 0, 2))}
    forest = Forest(
        np.zeros(1, np.int32),
        np.ones(1, np.int64),
        parent,
        level,
        stage,
        {},
        BroadcastTrees(parent, level, stage, detour),
    )
    assert verify(forest, fabric) == []
    assert load(forest, fabric).sent[:, 0].tolist() == [2, 2, 1, 0]
    check_sums(fabric, {server: compile_program(forest, server) for server in fabric.servers}, 10)


def test_unequal_shares():
    forest = plan(HEALTHY).forest
    weighted = replace(forest, weight=np.arange(1, 19, dtype=np.int64))
    assert verify(weighted, HEALTHY) == []
    assert weighted.whole == 171
    assert weighted.share(17) == Fraction(18, 171)
    programs = {server: compile_program(weighted, server) for server in HEALTHY.servers}
    assert programs[3].cut(2, 171) == 1 + 2
    assert programs[3].cut(18, 1000) == 1000
    assert programs[3].cut(17, 1000) == 153 * 1000 // 171
    check_sums(HEALTHY, programs, 500)


def test_load_counts_every_nic_in_both_directions():
    healthy = load(plan(HEALTHY).forest, HEALTHY)
    assert healthy.whole == 18
    assert (healthy.sent == 16).all()
    assert (healthy.received == 16).all()
    lost = load(plan(DAMAGED, "detour").forest, DAMAGED)
    assert lost.sent[0].tolist() == [0, 0]
    assert lost.busiest == Fraction(17, 16)
    # Every hop is sent once and received once.
    assert lost.sent.sum() == lost.received.sum()


def test_a_dead_server_has_no_program():
    with pytest.raises(UsageError, match="server 0 has no part"):
        compile_program(plan(DAMAGED, "detour").forest, 0)
    with pytest.raises(UsageError, match="server 9 has no part"):
        compile_program(plan(DAMAGED, "detour").forest, 9)


@pytest.mark.slow
def test_256_servers_and_512_pieces_are_verified():
    fabric = parse("bcube:16x2").without("switch:0/3", "server:200")
    forest = plan(fabric, "detour").forest
    assert forest.parent.shape == (510, 256)
    assert verify(forest, fabric) == []
