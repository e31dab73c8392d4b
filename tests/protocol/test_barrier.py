"""No server passes the barrier before all have entered it; all pass once all have."""

import random

import pytest

from bml.protocol.step.barrier import Barrier, barrier_phases
from bml.topology import Fabric, UsageError, parse

FABRICS = (
    "bcube:2x1",
    "bcube:2x2",
    "bcube:3x1",
    "bcube:3x2",
    "bcube:2x3",
    "bcube:4x2",
    "torus:3x2",
    "switch:4",
)
DAMAGE: tuple[tuple[str, ...], ...] = (
    (),
    ("server:0",),
    ("server:1",),
    ("link:0/0",),
    ("switch:0/0",),
    ("server:0", "link:1/0", "link:2/1"),
)


def cases() -> list[Fabric]:
    found = []
    for name in FABRICS:
        for damage in DAMAGE:
            try:
                fabric = parse(name).without(*damage)
            except UsageError:
                continue
            if fabric.is_connected:
                found.append(fabric)
    return found


def cross(fabric: Fabric, chance: random.Random) -> tuple[int, int]:
    """Let all enter and all tokens arrive in any order; returns (tokens sent, depth of the longest chain)."""
    barriers = {server: Barrier(barrier_phases(fabric, server)) for server in fabric.servers}
    outside = list(fabric.servers)
    bag: list[tuple[int, int, int]] = []
    sent = 0

    def post(server: int, tokens: list) -> None:
        nonlocal sent
        for peer, level, round_ in tokens:
            assert peer in fabric.neighbours(server, level), "a token goes to a live neighbour"
            bag.append((peer, server, round_))
            sent += 1

    while outside or bag:
        index = chance.randrange(len(outside) + len(bag))
        if index < len(outside):
            server = outside.pop(index)
            post(server, barriers[server].enter())
        else:
            to, origin, round_ = bag.pop(index - len(outside))
            post(to, barriers[to].token(origin, round_))
        if outside:
            passed = [server for server, barrier in barriers.items() if barrier.passed]
            assert not passed, f"{passed} passed before {outside} entered"
        for barrier in barriers.values():
            assert barrier.passed == (not barrier.missing) or not barrier.passed
    assert all(barrier.passed for barrier in barriers.values())
    return sent, len(bag)


@pytest.mark.parametrize("fabric", cases(), ids=str)
def test_no_server_passes_before_all_have_entered(fabric: Fabric) -> None:
    for seed in range(12):
        cross(fabric, random.Random(seed))


@pytest.mark.parametrize("fabric", cases(), ids=str)
def test_no_server_passes_while_one_stays_outside(fabric: Fabric) -> None:
    for absent in fabric.servers:
        if len(fabric.servers) == 1:
            continue
        barriers = {server: Barrier(barrier_phases(fabric, server)) for server in fabric.servers}
        bag = [
            (token.peer, server, token.round)
            for server, barrier in barriers.items()
            if server != absent
            for token in barrier.enter()
        ]
        while bag:
            to, origin, round_ = bag.pop()
            bag += [(token.peer, to, token.round) for token in barriers[to].token(origin, round_)]
        assert not any(barrier.passed for barrier in barriers.values())


@pytest.mark.parametrize(
    ("name", "tokens"), [("bcube:3x1", 6), ("bcube:3x2", 36), ("bcube:4x2", 96), ("bcube:2x3", 24)]
)
def test_a_healthy_bcube_sends_one_token_per_neighbour(name: str, tokens: int) -> None:
    assert cross(parse(name), random.Random(0))[0] == tokens


def test_a_damaged_fabric_sends_two_tokens_per_tree_edge() -> None:
    fabric = parse("bcube:3x2").without("server:4", "link:0/1")
    assert cross(fabric, random.Random(0))[0] == 2 * (len(fabric.servers) - 1)


def test_all_tokens_of_a_server_are_sent_when_it_passes() -> None:
    """So nothing of the next step can overtake them on a connection."""
    for fabric in cases():
        for server in fabric.servers:
            phases = barrier_phases(fabric, server)
            barrier = Barrier(phases)
            tokens = barrier.enter()
            for phase in phases:
                for peer, round_ in sorted(phase.wait):
                    assert not barrier.passed
                    tokens += barrier.token(peer, round_)
            assert barrier.passed
            assert tokens == [token for phase in phases for token in phase.send]


def test_missing_servers_are_named() -> None:
    barrier = Barrier(barrier_phases(parse("bcube:3x2"), 4))
    barrier.enter()
    assert barrier.missing == [3, 5]
    barrier.token(3, 0)
    assert barrier.missing == [5]
    barrier.token(5, 0)
    assert barrier.missing == [1, 7]


def test_a_single_survivor_passes_at_once() -> None:
    barrier = Barrier(barrier_phases(parse("bcube:2x1").without("server:0"), 1))
    assert barrier.enter() == []
    assert barrier.passed


def test_tokens_that_are_not_awaited_do_no_harm() -> None:
    barrier = Barrier(barrier_phases(parse("bcube:3x2"), 0))
    for peer in range(9):
        for round_ in (5, 7, 2**40):
            assert barrier.token(peer, round_) == []
    barrier.enter()
    assert not barrier.passed
