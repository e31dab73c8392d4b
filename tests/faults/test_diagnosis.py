"""Diagnosis against the truth: a set of failures, all suspicions that it causes, and what is concluded."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from counted_steps import counted_steps

from bml.faults.detector import Suspicion
from bml.faults.diagnosis import Diagnosis, Evidence, diagnose, settle
from bml.topology import (
    Fabric,
    FabricError,
    Failure,
    InvariantError,
    LinkFailure,
    ServerFailure,
    SwitchFailure,
    bcube,
    parse,
    parse_failure,
)

FABRIC = bcube(3, 2)
SHAPES = [(2, 2), (3, 2), (4, 2), (2, 3), (3, 3)]


def suspect(observer: int, peer: int, level: int, kind: str = "silence", why: str = "") -> Suspicion:
    return Suspicion(observer, peer, level, kind, 0.5, why)


def caused_by(before: Fabric, *truth: Failure | str) -> list[Suspicion]:
    """Every suspicion that the live servers raise after `truth` struck."""
    after = before.without(*truth)
    return [
        suspect(observer, peer, level)
        for observer in after.servers
        for level in range(before.levels)
        for peer in before.neighbours(observer, level)
        if not (after.nic_alive(observer, level) and after.nic_alive(peer, level))
    ]


def diagnosed(before: Fabric, *truth: Failure | str, seed: int = 0) -> Diagnosis:
    suspicions = caused_by(before, *truth)
    np.random.default_rng(seed).shuffle(suspicions)  # type: ignore[arg-type]
    return diagnose(before, Evidence({}, tuple(suspicions)))


def unexplained(
    before: Fabric, suspicions: list[Suspicion], failures: tuple[Failure, ...]
) -> list[Suspicion]:
    after = before.without(*failures)
    return [
        s for s in suspicions if after.nic_alive(s.observer, s.level) and after.nic_alive(s.peer, s.level)
    ]


def parts(fabric: Fabric) -> list[Failure]:
    return [
        *(ServerFailure(server) for server in fabric.servers),
        *(LinkFailure(*link) for link in fabric.links),
        *(SwitchFailure(*switch) for switch in fabric.switches),
    ]


@pytest.mark.parametrize(("ports", "levels"), [shape for shape in SHAPES if shape[0] > 2])
def test_every_single_failure_is_found(ports: int, levels: int) -> None:
    fabric = bcube(ports, levels)
    for seed, truth in enumerate(parts(fabric)):
        assert diagnosed(fabric, truth, seed=seed).failures == (truth,)


@pytest.mark.parametrize("levels", [2, 3])
def test_with_two_port_switches_a_switch_and_its_two_nics_are_one_case(levels: int) -> None:
    fabric = bcube(2, levels)
    for truth in parts(fabric):
        expected = truth
        if isinstance(truth, LinkFailure):
            expected = LinkFailure(
                fabric.members(truth.level, fabric.group(truth.server, truth.level))[0], truth.level
            )
        elif isinstance(truth, SwitchFailure):
            expected = LinkFailure(fabric.members(truth.level, truth.group)[0], truth.level)
        assert diagnosed(fabric, truth).failures == (expected,)


def test_with_one_level_the_only_nic_of_a_server_is_the_server() -> None:
    fabric = bcube(4, 1)
    assert diagnosed(fabric, "link:2/0").failures == (ServerFailure(2),)
    assert diagnosed(fabric, "server:2").failures == (ServerFailure(2),)
    assert diagnosed(fabric, "switch:0/0").failures == (SwitchFailure(0, 0),)


@pytest.mark.parametrize(("ports", "levels"), SHAPES)
def test_random_failures_are_explained_by_no_more_than_there_are(ports: int, levels: int) -> None:
    fabric = bcube(ports, levels)
    rng = np.random.default_rng(ports * 10 + levels)
    choices = parts(fabric)
    for seed in range(60):
        truth = [choices[i] for i in rng.choice(len(choices), int(rng.integers(1, 5)), replace=False)]
        suspicions = caused_by(fabric, *truth)
        found = diagnosed(fabric, *truth, seed=seed)
        assert unexplained(fabric, suspicions, found.failures) == []
        assert len(found.failures) <= len(truth), (truth, found)
        assert found == diagnosed(fabric, *truth, seed=seed + 1000)
        assert bool(found.reason) == bool(suspicions)


def test_failures_of_different_kinds_far_apart_are_found_exactly() -> None:
    fabric = bcube(4, 2)
    truth = tuple(sorted(map(parse_failure, ["server:5", "link:2/0", "switch:1/3"])))
    assert diagnosed(fabric, *truth).failures == truth


def test_failures_come_one_after_another() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        fabric = bcube(4, 2)
        for _ in range(4):
            choices = parts(fabric)
            truth = choices[int(rng.integers(len(choices)))]
            suspicions = caused_by(fabric, truth)
            found = diagnosed(fabric, truth)
            assert unexplained(fabric, suspicions, found.failures) == []
            fabric = fabric.without(*settle(fabric, found.failures).failures)
            assert fabric.is_connected


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shape", "n"),
    [
        ("switch:6", 60),
        ("switch:9", 60),
        ("fattree:4", 15),
        pytest.param("fattree:4", 60, marks=pytest.mark.slow),
    ],
)
def test_the_living_are_not_blamed_where_more_are_dead(shape: str, n: int) -> None:
    """To blame the few that live would explain as much with fewer failures: but they hear each other."""
    fabric = parse(shape)
    rng = np.random.default_rng(7)
    for seed in range(n):
        n_dead = int(rng.integers(fabric.n_servers // 2, fabric.n_servers - 1))
        dead = {ServerFailure(int(server)) for server in rng.permutation(fabric.n_servers)[:n_dead]}
        living = max(fabric.without(*dead).components(), key=len)
        found = {*diagnosed(fabric, *dead, seed=seed).failures}
        if len(living) > 1:
            assert not found & {ServerFailure(server) for server in living}, (dead, found)
        if shape.startswith("switch"):
            assert found == dead


@pytest.mark.parametrize(
    ("shape", "seen", "blamed"),
    [
        ("switch:6", [(1, 2), (1, 3)], "server:1"),
        ("switch:8", [(1, 2), (1, 3), (1, 4), (1, 5), (1, 6)], "server:1"),
        ("bcube:4x2", [(1, 2), (1, 3)], "link:1/0"),
    ],
)
def test_a_server_that_alone_suspects_several_is_blamed_itself(
    shape: str, seen: list[tuple[int, int]], blamed: str
) -> None:
    """Those whom it hears would suspect them, too, and do not."""
    found = diagnose(parse(shape), Evidence({}, tuple(suspect(*pair, 0) for pair in seen)))
    assert found.failures == (parse_failure(blamed),)


def test_a_server_of_which_one_connection_stands_still_and_one_was_reset_is_blamed_itself() -> None:
    seen = stall(1, 2), suspect(1, 3, 0, "reset")
    assert diagnose(parse("switch:6"), Evidence({}, seen)).failures == (ServerFailure(1),)


def test_one_silent_nic_is_a_link() -> None:
    found = diagnosed(FABRIC, "link:4/0")
    assert found.failures == (LinkFailure(4, 0),)
    assert found.reason == "NIC 4/0 is silent towards 3 and 5"


def test_a_nic_that_only_hears_nothing_is_a_link_too() -> None:
    found = diagnose(FABRIC, Evidence({}, (suspect(4, 3, 0), suspect(4, 5, 0))))
    assert found == Diagnosis((LinkFailure(4, 0),), "NIC 4/0 hears nothing from 3 and 5")


def test_all_nics_of_a_server_are_the_server() -> None:
    found = diagnosed(FABRIC, "server:4")
    assert found == Diagnosis((ServerFailure(4),), "server 4 is silent on all its NICs (seen by 1, 3, 5, 7)")
    alive = diagnosed(FABRIC, "link:4/0", "link:4/1")
    assert alive.failures == (ServerFailure(4),)


def test_a_server_seen_by_few_is_still_the_server() -> None:
    found = diagnose(FABRIC, Evidence({}, (suspect(3, 4, 0), suspect(1, 4, 1))))
    assert found == Diagnosis((ServerFailure(4),), "server 4 is silent on all its NICs (seen by 1, 3)")


def test_two_of_three_nics_are_not_the_server() -> None:
    fabric = bcube(3, 3)
    truth = (LinkFailure(13, 0), LinkFailure(13, 2))
    assert diagnosed(fabric, *truth).failures == truth


def test_the_last_nic_of_a_server_is_the_server() -> None:
    found = diagnosed(FABRIC.without("link:4/0"), "link:4/1")
    assert found.failures == (ServerFailure(4),)
    assert "silent" in found.reason


def test_all_nics_of_a_switch_are_the_switch() -> None:
    found = diagnosed(FABRIC, "switch:0/2")
    assert found == Diagnosis((SwitchFailure(0, 2),), "all NICs of switch 0/2 are silent (seen by 6, 7, 8)")


def test_a_switch_over_which_some_still_hear_each_other_is_not_blamed() -> None:
    truth = (LinkFailure(0, 0), LinkFailure(1, 0))
    assert diagnosed(bcube(4, 2), *truth).failures == truth


def test_an_accused_server_is_blamed_before_its_accuser() -> None:
    assert diagnose(FABRIC, Evidence({}, (suspect(3, 5, 0),))).failures == (LinkFailure(5, 0),)


def test_the_dead_explain_what_is_said_about_them() -> None:
    suspicions = [*caused_by(FABRIC, "server:4"), *caused_by(FABRIC, "link:2/0"), suspect(4, 3, 0, "reset")]
    found = diagnose(FABRIC, Evidence({4: "is dead: process exited with -9"}, tuple(suspicions)))
    assert found.failures == (ServerFailure(4), LinkFailure(2, 0))
    assert found.reason == ("server 4 is dead: process exited with -9; NIC 2/0 is silent towards 0 and 1")


def test_own_nic_is_certain() -> None:
    own = suspect(3, 3, 0, "own-nic", "carrier lost")
    found = diagnose(FABRIC, Evidence({}, (own, suspect(3, 4, 0), suspect(4, 3, 0))))
    assert found == Diagnosis((LinkFailure(3, 0),), "NIC 3/0 is dead, its own server says: carrier lost")
    both = diagnose(FABRIC, Evidence({}, (own, suspect(3, 3, 1, "own-nic", "carrier lost"))))
    assert both.failures == (ServerFailure(3),)


def test_a_server_that_does_not_answer_is_a_server_failure() -> None:
    found = diagnose(FABRIC, Evidence({}, (suspect(-1, 6, -1, "no-answer", "0.75 s passed"),)))
    assert found == Diagnosis((ServerFailure(6),), "server 6 does not answer: 0.75 s passed")


def test_resets_are_named_as_such() -> None:
    found = diagnose(FABRIC, Evidence({}, (suspect(3, 4, 0, "reset"), suspect(5, 4, 0, "reset"))))
    assert found.reason == "NIC 4/0 was reset towards 3 and 5"


def test_what_is_known_dead_is_not_repeated() -> None:
    fabric = FABRIC.without("link:4/0", "server:8")
    said = (suspect(3, 4, 0), suspect(4, 5, 0), suspect(6, 8, 0), suspect(4, 4, 0, "own-nic"))
    assert diagnose(fabric, Evidence({8: "is dead: gone"}, said)) == Diagnosis((), "")
    assert diagnose(FABRIC, Evidence()) == Diagnosis((), "")


@pytest.mark.parametrize(
    ("observer", "peer", "level"), [(0, 4, 0), (0, 0, 0), (0, 12, 0), (0, 1, 2), (-1, 1, 0)]
)
def test_suspicions_between_strangers_are_a_bug(observer: int, peer: int, level: int) -> None:
    with pytest.raises(InvariantError, match="not neighbours"):
        diagnose(FABRIC, Evidence({}, (suspect(observer, peer, level),)))


def test_many_failures_at_once_are_explained_with_bounded_effort() -> None:
    fabric = bcube(8, 2)
    truth = [LinkFailure(server, (server // 3) % 2) for server in range(0, 64, 3)]
    suspicions = caused_by(fabric, *truth)
    evidence = Evidence({}, tuple(suspicions))
    found = diagnose(fabric, evidence)
    assert counted_steps(lambda: diagnose(fabric, evidence)) < 20_000_000, "it takes a million"
    assert unexplained(fabric, suspicions, found.failures) == []


def test_all_pairs_of_failures_on_the_demo_fabric() -> None:
    for truth in itertools.combinations(parts(FABRIC), 2):
        found = diagnosed(FABRIC, *truth)
        assert unexplained(FABRIC, caused_by(FABRIC, *truth), found.failures) == []
        assert len(found.failures) <= 2


def test_settling_keeps_the_largest_part() -> None:
    assert settle(FABRIC, [ServerFailure(4)]) == ((0, 1, 2, 3, 5, 6, 7, 8), (ServerFailure(4),), "")
    cut = settle(FABRIC, [SwitchFailure(0, 1), LinkFailure(4, 1)])
    assert cut.members == (0, 1, 2, 3, 5, 6, 7, 8)
    assert cut.failures == (ServerFailure(4), LinkFailure(4, 1), SwitchFailure(0, 1))
    assert cut.reason == "server 4 is cut off from the other 8"


def test_settling_a_split_in_halves_keeps_the_lower() -> None:
    split = settle(bcube(2, 2), [SwitchFailure(0, 0), SwitchFailure(0, 1)])
    assert split.members == (0, 2)
    assert split.reason == "servers 1 and 3 are cut off from the other 2"


def test_settling_a_split_in_halves_keeps_the_one_that_was_heard() -> None:
    broken = [SwitchFailure(0, 0), SwitchFailure(0, 1)]
    assert settle(bcube(2, 2), broken, heard={1}).members == (1, 3)
    assert settle(bcube(2, 2), broken, heard={1, 2}).members == (0, 2)
    assert settle(FABRIC, [SwitchFailure(0, 1), LinkFailure(4, 1)], heard={4}).members != (4,)


def test_settling_knows_earlier_failures() -> None:
    assert settle(FABRIC.without("server:0"), [LinkFailure(1, 0)]).members == (1, 2, 3, 4, 5, 6, 7, 8)


def test_nobody_left() -> None:
    with pytest.raises(FabricError, match="no server of bcube:2x1 is left"):
        settle(bcube(2, 1), [ServerFailure(0), ServerFailure(1)])


def stall(observer: int, peer: int, level: int = 0) -> Suspicion:
    return suspect(observer, peer, level, "stall")


@pytest.mark.parametrize("seen", [[(4, 3)], [(3, 4)], [(3, 4), (4, 3)]])
def test_one_of_two_nics_is_given_up_for_a_connection_that_stands_still(seen: list[tuple[int, int]]) -> None:
    found = diagnose(FABRIC, Evidence({}, tuple(stall(*pair) for pair in seen)))
    assert found.failures == (LinkFailure(3, 0),), "whoever noticed"
    assert found.reason == "the data connection between NIC 3/0 and 4/0 stands still though heartbeats pass"


@pytest.mark.parametrize("losing", [3, 4])
@pytest.mark.parametrize("seen", [[(4, 3)], [(3, 4)], [(3, 4), (4, 3)]])
def test_of_two_nics_the_one_that_loses_segments_is_given_up(
    seen: list[tuple[int, int]], losing: int
) -> None:
    noticed = tuple(replace(stall(*pair), losing=losing) for pair in seen)
    found = diagnose(FABRIC, Evidence({}, noticed))
    assert found.failures == (LinkFailure(losing, 0),), "whoever noticed"
    assert found.reason == (
        f"the data connection between NIC {losing}/0 and {7 - losing}/0 stands still though heartbeats pass, "
        f"and NIC {losing}/0 loses segments"
    )


def test_the_nic_that_several_stalls_share_is_given_up_though_another_loses_segments() -> None:
    found = diagnose(FABRIC, Evidence({}, (replace(stall(3, 4), losing=3), stall(5, 4))))
    assert found.failures == (LinkFailure(4, 0),)
    assert "loses" not in found.reason


def test_the_nic_that_several_such_connections_share_is_given_up() -> None:
    found = diagnose(FABRIC, Evidence({}, (stall(3, 4), stall(5, 4))))
    assert found.failures == (LinkFailure(4, 0),)
    assert found.reason == (
        "the data connections between NIC 4/0 and 3/0 and 5/0 stand still though heartbeats pass"
    )


def test_a_stall_costs_no_server_that_can_be_kept() -> None:
    """Server 3 has no other NIC left."""
    left = FABRIC.without(LinkFailure(3, 1))
    for noticed in (stall(3, 4), replace(stall(3, 4), losing=3)):
        found = diagnose(left, Evidence({}, (noticed, stall(4, 3))))
        assert found.failures == (LinkFailure(4, 0),)
    assert settle(left, found.failures).members == tuple(range(9))


def test_a_server_whose_connections_all_stand_still_is_lost_and_not_called_silent() -> None:
    seen = tuple(stall(4, peer, level) for level in range(2) for peer in FABRIC.neighbours(4, level))
    found = diagnose(FABRIC, Evidence({}, seen))
    assert found.failures == (ServerFailure(4),)
    assert "stand still though heartbeats pass" in found.reason
    assert "silent" not in found.reason


def test_a_dead_server_is_blamed_though_some_of_its_connections_stood_still() -> None:
    seen = [*caused_by(FABRIC, ServerFailure(4)), stall(1, 4, 1)]
    assert diagnose(FABRIC, Evidence({}, tuple(seen))).failures == (ServerFailure(4),)


@pytest.mark.parametrize(
    "truth", [("server:4",), ("switch:0/1",), ("link:2/0", "link:5/1"), ("server:0", "link:7/1")]
)
def test_what_is_too_much_to_search_is_explained_greedily(
    truth: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bml.faults.diagnosis.SEARCH_NODES", 0)
    suspicions = caused_by(FABRIC, *truth)
    found = diagnose(FABRIC, Evidence({}, tuple(suspicions)))
    assert not unexplained(FABRIC, suspicions, found.failures)
    assert len(found.failures) <= len(truth) + 1
