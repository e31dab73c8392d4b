"""The proposal of a coordinator when all statuses are there."""

from __future__ import annotations

from bml.protocol.coordinator.ballot import Ballot
from bml.protocol.coordinator.known import KnownViews
from bml.protocol.wire.messages import Status, View


def view(epoch: int, learners: tuple[int, ...]) -> View:
    return View(epoch, (0, 1, 2), (), 0, "test", 0.0, learners=learners)


def stands(server: int, old: View, behind: bool = False) -> Status:
    return Status(server, 1, 2, 2, old, old, 5, -1, "", "", behind=behind)


def test_a_learner_that_has_fallen_behind_since_it_was_level_learns_on() -> None:
    old = view(1, learners=(2,))
    for behind in (False, True):
        ballot = Ballot(view(2, learners=()), frozenset())
        ballot.statuses = {server: stands(server, old, behind and server == 2) for server in range(3)}
        assert ballot.decide(old).learners == ((2,) if behind else ())


def test_a_contributor_never_becomes_a_learner_again() -> None:
    old = view(1, learners=())
    ballot = Ballot(view(2, learners=()), frozenset())
    ballot.statuses = {server: stands(server, old, behind=True) for server in range(3)}
    assert ballot.decide(old).learners == ()


def test_an_abandoned_proposal_does_not_bind() -> None:
    old = View(1, (0, 1, 2), (), 5, "test", 0.0)
    abandoned = View(2, (1, 2), ("server:0",), 6, "server 0 is silent", 0.0)
    asked = View(3, (0, 1), ("server:2",), 0, "server 2 is dead", 0.0)
    slow = Status(0, 1, 3, 3, old, old, 5, -1, "", "")
    complete = Status(1, 1, 3, 3, old, abandoned, 5, 6, "", "")
    for ours, commit in ((abandoned,), 5), ((), 6):
        ballot = Ballot(asked, frozenset())
        ballot.statuses = {0: slow, 1: complete}
        assert ballot.decide(old, ours).commit == commit, "that of another coordinator may be in force"


def test_a_view_that_all_accepted_counts_although_an_abandoned_proposal_took_its_place() -> None:
    before = View(1, (0, 1, 2), (), 5, "test", 0.0)
    in_force = View(2, (0, 1, 2), (), 6, "test", 0.0)
    abandoned = View(3, (0, 1), ("server:2",), 6, "server 2 is silent", 0.0)
    ballot = Ballot(View(4, (0, 1), ("server:2",), 0, "server 2 is dead", 0.0), frozenset())
    ballot.statuses = {server: Status(server, 1, 4, 4, before, abandoned, 5, 6, "", "") for server in (0, 1)}
    assert ballot.decide(in_force, (abandoned,)).commit == 6


def test_learners_that_are_to_contribute_are_none_of_those_more_than_half_of_whom_are_needed() -> None:
    known = KnownViews((0, 1), None)
    known.put_in_force(View(2, (0, 1, 2, 3), (), 0, "test", 0.0, learners=(2, 3)))
    assert known.shortage((0, 2)), "the other side of a cut would go on, too"
    assert known.shortage((1, 3))
    assert not known.shortage((0, 1, 2))
