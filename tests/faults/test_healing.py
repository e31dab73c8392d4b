"""When a broken part may be used again: heard for long enough, and longer after every failure."""

from __future__ import annotations

import random

import pytest

from bml.faults.healing import MOST_STABLE, Recovery, healed, listened, stable_s
from bml.topology import bcube, parse_failure

INTERVAL_S, DETECT_S = 0.1, 0.5


def heartbeats(recovery: Recovery, start_s: float, stop_s: float) -> tuple[list[float], list[float]]:
    """Hear (1, 0) every interval; returns when it became trusted and when no longer."""
    came, went = [], []
    for tick in range(round(start_s * 100), round(stop_s * 100)):
        now = tick / 100
        if tick % 10 == 0:
            recovery.heard(1, 0, now)
        changes = recovery.check(now)
        came += [now] * len(changes.came)
        went += [now] * len(changes.went)
        for peer, level in changes.probes:
            recovery.proved(peer, level)  # seen by the next look
    return came, went


def test_trusted_after_the_needed_time_and_not_before() -> None:
    recovery = Recovery(INTERVAL_S, DETECT_S)
    recovery.set_links({(1, 0): 1.0})
    (came,), went = heartbeats(recovery, 5.0, 8.0)
    assert came == pytest.approx(6.01)
    assert not went
    assert recovery.trusted == ((1, 0),)


def test_a_gap_starts_the_time_anew_and_takes_trust_back() -> None:
    recovery = Recovery(INTERVAL_S, DETECT_S)
    recovery.set_links({(1, 0): 1.0})
    assert heartbeats(recovery, 0.0, 0.9) == ([], [])
    assert heartbeats(recovery, 1.5, 2.4) == ([], [])  # silent in between
    (came,), _ = heartbeats(recovery, 2.4, 4.0)
    assert came == pytest.approx(2.51)
    assert recovery.check(4.5) == ([], [(1, 0)], [])


def test_a_link_that_carries_heartbeats_alone_is_never_trusted() -> None:
    recovery = Recovery(INTERVAL_S, DETECT_S)
    recovery.set_links({(1, 0): 1.0})
    probes = []
    for tick in range(1000):
        now = tick / 100
        if tick % 10 == 0:
            recovery.heard(1, 0, now)
        changes = recovery.check(now)
        assert not changes.came
        probes += [now] * len(changes.probes)
    # Each is given half a second, and what was heard before it counts no more.
    assert probes[:3] == pytest.approx([1.0, 2.5, 4.0], abs=0.11)


def test_a_proof_that_nobody_asked_for_or_that_comes_after_a_gap_does_not_count() -> None:
    recovery = Recovery(INTERVAL_S, DETECT_S)
    recovery.set_links({(1, 0): 1.0})
    recovery.proved(1, 0)
    recovery.proved(7, 7)
    for tick in range(11):
        recovery.heard(1, 0, tick / 10)
    assert recovery.check(1.0) == ([], [], [(1, 0)])
    recovery.heard(1, 0, 1.5)  # it was silent: the time starts anew
    recovery.proved(1, 0)
    for tick in range(15, 26):
        recovery.heard(1, 0, tick / 10)
    assert recovery.check(2.5) == ([], [], [(1, 0)])


def test_only_listed_links_are_listened_to() -> None:
    recovery = Recovery(INTERVAL_S, DETECT_S)
    recovery.heard(1, 0, 0.0)
    assert recovery.check(9.0) == ([], [], [])
    recovery.set_links({(1, 0): 0.0})
    recovery.set_links({})
    assert recovery.links == ()


def test_waiting_doubles_with_every_failure() -> None:
    assert [stable_s(times, DETECT_S) for times in (0, 1, 2, 3, 4)] == [1, 1, 2, 4, 8]
    assert stable_s(1000, DETECT_S) == MOST_STABLE * DETECT_S


def test_links_to_listen_to() -> None:
    fabric = bcube(3, 2)
    assert listened(fabric, 4, {"link:4/0": 1}, DETECT_S) == {(3, 0): 1.0, (5, 0): 1.0}
    assert listened(fabric, 3, {"link:4/0": 2}, DETECT_S) == {(4, 0): 2.0}
    assert listened(fabric, 1, {"link:4/0": 1}, DETECT_S) == {}
    assert listened(fabric, 3, {"server:4": 1}, DETECT_S) == {}, "a dead server says nothing"
    assert listened(fabric, 3, {"switch:0/1": 3}, DETECT_S) == {(4, 0): 4.0, (5, 0): 4.0}
    assert listened(fabric, 3, {"switch:0/1": 1, "server:5": 1}, DETECT_S) == {(4, 0): 1.0}


def pairs(*servers: int, level: int) -> set[tuple[int, int, int]]:
    return {(a, b, level) for a in servers for b in servers if a != b}


@pytest.mark.parametrize(
    ("failures", "trusted", "expected"),
    [
        (["link:4/0"], {(4, 3, 0), (3, 4, 0), (4, 5, 0), (5, 4, 0)}, ["link:4/0"]),
        (["link:4/0"], {(4, 3, 0), (3, 4, 0), (4, 5, 0)}, []),
        (["link:4/0", "link:5/0"], {(4, 3, 0), (3, 4, 0)}, ["link:4/0"]),
        (["link:3/0", "link:4/0", "link:5/0"], pairs(3, 4, level=0), []),
        (["link:3/0", "link:4/0", "link:5/0"], pairs(3, 4, 5, level=0), ["link:3/0", "link:4/0", "link:5/0"]),
        (["switch:0/1"], pairs(3, 4, 5, level=0), ["switch:0/1"]),
        (["switch:0/1"], pairs(3, 4, level=0), []),
        (["server:5", "switch:0/1"], pairs(3, 4, level=0), ["switch:0/1"]),
        (["server:5"], pairs(3, 4, 5, level=0), []),
    ],
)
def test_what_works_again(
    failures: list[str], trusted: set[tuple[int, int, int]], expected: list[str]
) -> None:
    found = healed(bcube(3, 2), [parse_failure(text) for text in failures], trusted)
    assert sorted(map(str, found)) == expected


@pytest.mark.parametrize("seed", range(200))
def test_parts_that_work_are_found_and_those_that_do_not_are_not(seed: int) -> None:
    rng = random.Random(seed)
    fabric = bcube(*rng.choice([(3, 2), (4, 2), (2, 3)]))
    links = [f"link:{server}/{level}" for server, level in rng.sample(fabric.links, rng.randint(1, 4))]
    back = set(rng.sample(links, rng.randint(0, len(links))))
    really = fabric.without(*(set(links) - back))
    trusted = {
        (server, peer, level)
        for server in really.servers
        for level in range(really.levels)
        for peer in really.neighbours(server, level)
    }
    found = {str(part) for part in healed(fabric, [parse_failure(text) for text in links], trusted)}
    assert found <= back
    lonely = {
        text
        for text in back
        if not fabric.without(*(set(links) - {text})).neighbours(
            *_nic(text)
        )  # all its peers' NICs failed too
    }
    assert back - lonely <= found


def _nic(text: str) -> tuple[int, int]:
    server, level = text.removeprefix("link:").split("/")
    return int(server), int(level)


def test_views_that_follow_one_another_closely_do_not_keep_a_part_out() -> None:
    recovery = Recovery(interval_s=0.1, proof_s=0.5)
    needed = {(1, 0): 1.0}
    probed: list[float] = []
    for tick in range(1, 14):  # a new view every 0.3 s
        now = tick / 10
        if tick % 3 == 1:
            recovery.set_links(needed)
        recovery.heard(1, 0, now)
        probed += [now for _ in recovery.check(now).probes]
    assert probed == [pytest.approx(1.1)]
    recovery.proved(1, 0)
    assert recovery.check(1.35).came == [(1, 0)]
    recovery.set_links(needed)
    assert recovery.trusted == (), "in the new view that is still to be told"
    assert recovery.check(1.36).came == [(1, 0)]
    recovery.set_links({(1, 0): 2.0})  # it has failed once more, elsewhere
    assert recovery.check(1.37) == ([], [], [])
    recovery.set_links({})
    recovery.set_links(needed)
    recovery.heard(1, 0, 1.4)
    assert recovery.check(1.4) == ([], [], []), "it was used meanwhile"
