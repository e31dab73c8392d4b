"""What a coordinator proposes when all have said where they stand."""

from __future__ import annotations

from bml.protocol.ballot import Ballot
from bml.protocol.messages import Status, View


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
