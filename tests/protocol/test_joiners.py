"""Joiners: which are let in, which wait, and which failures end when a server comes again."""

from __future__ import annotations

from typing import Any

from bml.protocol.coordinator import core as coord
from bml.protocol.coordinator.joiners import Joiners, works_again
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import Incarnation, View
from bml.topology import parse, parse_failure

FABRIC = parse("bcube:2x2")
INCARNATION = Incarnation(0, 5)


def view(*failures: str) -> View:
    return View(3, FABRIC.without(*failures).servers, failures, 7, "", 0.0)


def waiting(*failures: str) -> Joiners:
    joiners = Joiners()
    joiners.asks_to_join(INCARNATION)
    for server in view(*failures).members:
        joiners.can_send_state(server)
    return joiners


def test_links_of_an_earlier_incarnation_do_not_keep_a_server_out() -> None:
    standing = ("link:0/0", "link:0/1", "server:0", "link:3/0")
    assert works_again(FABRIC, standing, [0]) == {"server:0", "link:0/0", "link:0/1"}


def test_a_link_that_is_out_stays_so_while_another_works() -> None:
    assert works_again(FABRIC, ("link:0/0", "server:0"), [0]) == {"server:0"}


def test_without_joiners_no_failure_ends() -> None:
    assert works_again(FABRIC, ("link:0/0", "link:0/1", "server:0"), []) == frozenset()


def test_a_joiner_out_of_reach_waits_until_the_failures_change() -> None:
    broken = ("server:0", "switch:0/0", "switch:1/0")
    joiners = waiting(*broken)
    assert joiners.admitted(view(*broken)) == {0: INCARNATION}
    assert joiners.reached({0: INCARNATION}, (1, 2, 3), map(parse_failure, broken)) == {}
    assert joiners.admitted(view(*broken)) == {}, "or there would be view after view for nothing"
    assert joiners.waiting == (0,)
    assert joiners.admitted(view("server:0", "switch:1/0")) == {0: INCARNATION}
    assert joiners.reached({0: INCARNATION}, (0, 1, 2, 3), ()) == {0: INCARNATION}


def test_a_new_incarnation_of_it_is_tried_anew() -> None:
    broken = ("server:0", "switch:0/0", "switch:1/0")
    joiners = waiting(*broken)
    joiners.reached({0: INCARNATION}, (1, 2, 3), map(parse_failure, broken))
    joiners.drop(0)
    joiners.asks_to_join(Incarnation(0, 6))
    assert joiners.admitted(view(*broken)) == {0: Incarnation(0, 6)}


class Desk:
    """A coordinator whose servers always agree."""

    def __init__(self) -> None:
        self.core = coord.Coordinator(FABRIC, 1, Timeouts.of(0.5), 1, 0.0)
        self.now = 0.0
        self.stands: dict[int, Any] = dict.fromkeys(FABRIC.servers)
        self.incarnations: dict[int, Incarnation | None] = dict.fromkeys(FABRIC.servers)
        for server in FABRIC.servers:
            self.give(coord.Connected(server))
        for server in FABRIC.servers:
            self.give(coord.From(server, msg.CanSendState(server)))

    def give(self, event: coord.Event) -> None:
        """The same, and the servers' answers to it."""
        posts = [one for one in self.core.handle(event, self.now) if isinstance(one, coord.Post)]
        for server, message in posts:
            match message:
                case msg.Who() | msg.Freeze():
                    epoch = getattr(message, "epoch", 0)
                    known = self.stands[server]
                    promised = epoch or (known.epoch if known else 0)
                    self.give(coord.From(server, msg.Status(
                        server, 1, epoch, promised, known, known, 0, -1, "", "", self.incarnations[server]
                    )))  # fmt: skip
                case msg.Propose(_, proposed):
                    self.stands[server] = proposed
                    self.give(coord.From(server, msg.Accepted(server, 1, proposed.epoch)))

    def suspects(self, observer: int, peer: int, level: int) -> None:
        self.give(coord.From(observer, msg.Suspect(observer, peer, level, "silence", 0.5, "test")))

    def later(self) -> None:
        self.now += 1.0
        self.give(coord.Tick())

    def comes_again(self, server: int, number: int) -> None:
        self.incarnations[server], self.stands[server] = Incarnation(server, number), None
        self.give(coord.Connected(server))


def test_a_server_whose_nics_fell_silent_one_by_one_joins_again() -> None:
    desk = Desk()
    desk.suspects(0, 1, 0)
    desk.suspects(1, 0, 0)
    desk.later()
    assert desk.core.view is not None
    (first,) = desk.core.view.failures
    assert first in ("link:0/0", "link:1/0", "switch:0/0")
    desk.suspects(2, 0, 1)
    desk.suspects(0, 2, 1)
    desk.give(coord.Gone(0, "cannot be reached"))
    desk.later()
    assert 0 not in desk.core.view.members
    desk.comes_again(0, 5)
    assert 0 in desk.core.view.members
    assert desk.core.view.learners == (0,)
    assert desk.core.waiting == ()
