"""Notice to servers whose Ray nodes are draining, and machines that are asked for meanwhile."""

from __future__ import annotations

import math

import pytest

from bml.cluster.fleets.drains import Drains
from bml.cluster.fleets.shortage import PATIENCE_S, Shortage

NODE, OTHER = "a" * 56, "b" * 56


def told(drains: Drains, now_ms: float = 0.0) -> list[int]:
    return [server for server, _ in drains.notices(now_ms)]


def test_servers_of_a_draining_node_are_told_until_they_have_heard() -> None:
    drains = Drains()
    drains.seen({}, {0: 0, 1: 0, 2: 0})
    assert drains.homeless == [0, 1, 2], "they are asked before a node drains"
    assert told(drains) == []
    drains.seen({NODE: 0}, {0: 0, 1: 0, 2: 0})
    assert drains.homeless == [0, 1, 2]
    drains.lives(0, 0, NODE)
    drains.lives(1, 0, OTHER)
    assert drains.homeless == [2]
    assert told(drains) == [0]
    assert told(drains) == [0], "it has not answered"
    drains.heard(0)
    assert told(drains) == []
    drains.lives(2, 0, NODE)
    assert told(drains) == [], "server 0 is still leaving"
    drains.seen({NODE: 0}, {1: 0, 2: 0})
    assert told(drains) == [2]
    assert drains.made_leave(0, 0)
    assert not drains.made_leave(1, 0)


def test_fewer_than_half_of_the_servers_leave_at_a_time_until_all_of_a_node_have_left() -> None:
    homes = {0: NODE, 1: NODE, 2: NODE, 3: NODE, 4: OTHER, 5: OTHER, 6: "c" * 56}
    drains, here, waves = Drains(), dict.fromkeys(homes, 0), []
    drains.seen({NODE: 0, OTHER: 9_000}, here)
    for server, node in homes.items():
        drains.lives(server, 0, node)
    while wave := told(drains):
        assert wave == told(drains), "no others meanwhile"
        for number, server in enumerate(wave, 1):
            drains.heard(server)
            assert told(drains) == wave[number:]
        here = {server: 0 for server in here if server not in wave}
        drains.seen({NODE: 0, OTHER: 9_000}, here)
        waves.append(wave)
    assert waves == [[4, 5, 0], [1], [2], [3]], "those of the node that ends first, first"


def test_a_server_that_has_not_heard_and_may_stay_holds_up_no_other() -> None:
    drains = Drains()
    drains.seen({NODE: 0}, {0: 0, 1: 0, 2: 0})
    for server in range(3):
        drains.lives(server, 0, (NODE, OTHER, "c" * 56)[server])
    assert told(drains) == [0]
    drains.seen({OTHER: 0}, {0: 0, 1: 0, 2: 0})
    assert told(drains) == [1]


def test_all_leave_at_once_if_all_nodes_are_draining() -> None:
    drains = Drains()
    drains.seen({NODE: 0, OTHER: 0}, {0: 0, 1: 0, 2: 0})
    for server in range(3):
        drains.lives(server, 0, (NODE, OTHER)[server % 2])
    assert told(drains) == [0, 1, 2]


@pytest.mark.parametrize(("ends_ms", "within_s"), [(31_000, 18.0), (500, 0.0), (0, 15.0)])
def test_the_job_ends_once_if_the_node_of_its_launcher_is_draining(ends_ms: int, within_s: float) -> None:
    drains = Drains()
    drains.seen({OTHER: 0}, {0: 0, 1: 0})
    assert drains.end_of(NODE, 1_000) is None
    drains.seen({NODE: ends_ms}, {0: 0, 1: 0})
    why, seconds = drains.end_of(NODE, 1_000) or ("", 0.0)
    assert why.startswith("the launcher's Ray node aaaaaaaaaaaa is draining")
    assert seconds == pytest.approx(within_s)
    assert drains.end_of(NODE, 1_000) is None


def test_the_reason_names_the_node_and_when_it_ends() -> None:
    drains = Drains()
    drains.seen({NODE: 31_000, OTHER: 0}, {0: 0, 1: 0})
    drains.lives(0, 0, NODE)
    drains.lives(1, 0, OTHER)
    assert list(drains.notices(1_000)) == [
        (0, "its Ray node aaaaaaaaaaaa is draining, and ends in 30 s"),
        (1, "its Ray node bbbbbbbbbbbb is draining"),
    ]
    assert next(why for _, why in drains.notices(40_000)).endswith("ends in 0 s")


def test_a_server_that_came_again_is_told_of_its_new_node() -> None:
    drains = Drains()
    drains.seen({NODE: 0}, {0: 0})
    drains.lives(0, 0, NODE)
    assert told(drains) == [0]
    drains.heard(0)
    drains.seen({NODE: 0}, {})
    assert told(drains) == []
    drains.seen({NODE: 0}, {0: 3})
    assert drains.homeless == [0], "it may be anywhere"
    drains.lives(0, 3, OTHER)
    assert told(drains) == []
    drains.seen({NODE: 0, OTHER: 0}, {0: 3})
    assert told(drains) == [0]
    assert drains.made_leave(0, 3)


def test_a_node_that_drains_no_more_keeps_its_servers() -> None:
    drains = Drains()
    drains.seen({NODE: 0}, {0: 0})
    drains.lives(0, 0, NODE)
    drains.seen({}, {0: 0})
    assert told(drains) == []
    assert not drains.made_leave(0, 0)


def test_machines_are_asked_for_while_a_server_is_missing_and_given_back() -> None:
    shortage = Shortage()
    assert shortage.change([0, 1, 2, 3], 0.0) is None
    shortage.starts(3)
    assert shortage.change([0, 1, 2], 0.5) == 4
    shortage.not_asked()
    assert shortage.change([0, 1, 2], 1.0) == 4, "room for all of them: the cluster is asked as a whole"
    assert shortage.change([0, 1, 2], 1000.0) is None, "it is being started"
    shortage.starts(2)
    assert shortage.change([0, 1], 1001.0) is None, "still four"
    shortage.came(3)
    assert shortage.change([0, 1, 3], 1002.0) is None
    shortage.came(2)
    assert shortage.change([0, 1, 2, 3], 1003.0) == 0
    assert shortage.change([0, 1, 2, 3], 1004.0) is None
    assert shortage.end() is None


def test_a_server_that_fails_again_and_again_is_asked_for_as_long_as_it_is_tried() -> None:
    shortage = Shortage()
    shortage.starts(3)
    assert shortage.change([0], 0.0) == 2
    shortage.failed(3, 60.0)
    assert shortage.change([0], 60.0 + PATIENCE_S / 2) is None, "it is about to be tried again"
    shortage.starts(3)
    assert shortage.change([0], math.nextafter(60.0 + PATIENCE_S, 0)) is None
    shortage.failed(3, 200.0)
    assert shortage.change([0], 200.0 + PATIENCE_S) == 0, "it was given up"


def test_what_was_asked_for_may_stand_until_it_is_taken_back() -> None:
    shortage = Shortage()
    assert not shortage.is_asked
    shortage.starts(1)
    assert shortage.change([0], 0.0) == 2
    assert shortage.is_asked
    assert shortage.end() == 0
    assert not shortage.is_asked
    shortage.not_asked()
    assert shortage.is_asked


def test_machines_are_given_back_at_the_end_of_the_job() -> None:
    shortage = Shortage()
    shortage.starts(1)
    assert shortage.change([0], 0.0) == 2
    assert shortage.end() == 0
    assert shortage.end() is None
