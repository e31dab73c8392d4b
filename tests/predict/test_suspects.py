"""Which part is taken out of a job by a warning alone, from what all servers say; time is an argument."""

from __future__ import annotations

from typing import Any

import pytest

from bml.predict.suspects import PAUSE_S, SETTLED_S, Suspects

Said = tuple[str, float] | tuple[str, int, float]
"""A warning of a server's own part: kind, for how many seconds; between them the level of a NIC."""


def answers(
    n_servers: int, said: dict[int, list[Said]], per_machine: int = 1, last: tuple[int, ...] = ()
) -> dict[int, Any]:
    """What these servers answer; `last`: servers with a single NIC."""
    return {
        server: {
            "leaves": False,
            "machine": f"boot-{server // per_machine}",
            "suspects": [shown(server, each, server in last) for each in said.get(server, [])],
        }
        for server in range(n_servers)
    }


def shown(server: int, said: Said, last: bool) -> dict[str, Any]:
    kind, level, for_s = said if len(said) == 3 else (said[0], None, said[1])
    part = f"server {server}" if level is None else f"NIC {server}/{level}"
    return {"part": part, "server": server, "level": level, "kind": kind, "for_s": for_s, "last": last}


def parts(found: dict[int, Any], least: int | None = 0, now: float = 100.0) -> list[str]:
    return Suspects(least).candidates(found, now)


def test_one_part_of_which_one_server_warns_is_taken_out() -> None:
    assert parts(answers(4, {2: [("heat", 9.0)]})) == ["server 2"]
    assert parts(answers(4, {2: [("resent", 1, 9.0)]})) == ["NIC 2/1"]


@pytest.mark.parametrize("n_servers", [1, 2, 3, 4, 9])
def test_what_most_servers_warn_of_at_once_is_no_single_part(n_servers: int) -> None:
    most = range(n_servers // 2 + 1)
    assert parts(answers(n_servers, {server: [("resent", 0, 9.0)] for server in most})) == []
    assert parts(answers(n_servers, {server: [("filling", 9.0)] for server in most})) == []


def test_other_kinds_are_counted_apart() -> None:
    said: dict[int, list[Said]] = {0: [("resent", 0, 9.0)], 1: [("late", 1, 8.0)], 2: [("flaps", 0, 7.0)]}
    assert parts(answers(4, said)) == ["NIC 0/0", "NIC 1/1", "NIC 2/0"], "the oldest first"


def test_a_warning_waits_until_others_would_have_come() -> None:
    found = answers(4, {2: [("heat", SETTLED_S - 0.1)]})
    assert parts(found) == []
    found[2]["suspects"][0]["for_s"] = SETTLED_S
    assert parts(found) == ["server 2"]


def test_no_server_leaves_if_another_one_of_its_machine_would() -> None:
    said: dict[int, list[Said]] = {server: [("heat", 9.0)] for server in (0, 1, 2)}
    assert parts(answers(8, said, per_machine=4)) == []
    assert parts(answers(8, said)) == ["server 0", "server 1", "server 2"]
    young: dict[int, list[Said]] = {0: [("filling", 9.0)], 1: [("memory", 0.1)]}
    assert parts(answers(8, young, per_machine=4)) == [], "of another kind, and just now"
    assert parts(answers(8, {1: [("filling", 9.0)]}, per_machine=4)) == ["server 1"], "its own cgroup"


def test_a_nic_on_the_same_machine_keeps_nobody() -> None:
    said: dict[int, list[Said]] = {0: [("heat", 9.0)], 1: [("resent", 0, 4.0)]}
    assert parts(answers(8, said, per_machine=2)) == ["server 0", "NIC 1/0"]


def test_the_last_nic_of_a_server_stays() -> None:
    said: dict[int, list[Said]] = {2: [("resent", 0, 9.0)], 3: [("flaps", 0, 5.0)]}
    assert parts(answers(8, said, last=(2,))) == ["NIC 3/0"]


def test_one_part_at_a_time() -> None:
    suspects, said = Suspects(0), answers(8, {2: [("heat", 9.0)], 5: [("heat", 8.0)]})
    assert suspects.candidates(said, 100.0) == ["server 2", "server 5"]
    suspects.taken(100.0)
    assert suspects.candidates(said, 100.0 + PAUSE_S - 0.1) == []
    assert suspects.candidates(said, 100.0 + PAUSE_S) == ["server 2", "server 5"]


def test_nothing_goes_while_a_server_is_about_to_leave() -> None:
    found = answers(8, {2: [("heat", 9.0)]})
    found[5]["leaves"] = True
    assert parts(found) == []


def test_no_server_leaves_if_too_few_would_be_left() -> None:
    said: dict[int, list[Said]] = {2: [("heat", 9.0)], 0: [("resent", 0, 5.0)]}
    assert parts(answers(4, said), least=3) == ["server 2", "NIC 0/0"]
    assert parts(answers(4, said), least=4) == ["NIC 0/0"]
    assert parts(answers(3, {2: [("heat", 9.0)]}), least=None) == ["server 2"]
    assert parts(answers(2, {1: [("heat", 9.0)]}), least=None) == [], "one of two is not more than half"


def test_servers_that_are_over_say_nothing() -> None:
    found = answers(3, {2: [("heat", 9.0)]})
    assert parts({**found, 0: {}, 1: {"error": "it is over"}}, least=1) == []
    assert parts({}) == []
