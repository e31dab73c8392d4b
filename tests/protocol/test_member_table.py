"""Every row of the state table in bml/protocol/server/member.py."""

import pytest

from bml.protocol.server.events import Ended
from bml.protocol.server.member import Member
from bml.protocol.wire.messages import Accepted, Freeze, Propose, Refused, View


def view(epoch: int, commit: int = 0) -> View:
    return View(epoch, (0, 1, 2), (), commit, "test", 0.0)


def freeze(epoch: int, term: int = 1) -> Freeze:
    return Freeze(term, epoch, "test")


def propose(epoch: int, term: int = 1) -> Propose:
    return Propose(term, view(epoch))


@pytest.fixture
def running() -> Member:
    """Runs view 3 of term 1."""
    member = Member(0)
    assert member.freeze(freeze(3)) is None
    assert member.propose(propose(3)) == Accepted(0, 1, 3)
    member.install()
    assert not member.frozen
    assert member.epoch == 3
    return member


def test_nothing_runs_before_the_first_view() -> None:
    member = Member(0)
    assert member.frozen
    assert member.epoch == 0
    assert not member.may_install(1)


# running | Freeze, epoch > promised | frozen
def test_a_running_member_freezes_for_a_higher_epoch(running: Member) -> None:
    assert running.freeze(freeze(4)) is None
    assert running.frozen
    assert running.promised == (4, 1)
    assert running.epoch == 3


# frozen | Freeze, ballot > promised | frozen, reports again
@pytest.mark.parametrize(("epoch", "term"), [(5, 1), (4, 2), (9, 9)])
def test_a_frozen_member_promises_a_higher_ballot(running: Member, epoch: int, term: int) -> None:
    running.freeze(freeze(4))
    assert running.freeze(freeze(epoch, term)) is None
    assert running.promised == (epoch, term)


# frozen | Freeze, ballot = promised | frozen, reports again
def test_a_freeze_that_is_sent_again_is_answered_again(running: Member) -> None:
    running.freeze(freeze(4))
    assert running.freeze(freeze(4)) is None
    assert running.promised == (4, 1)


# any | Freeze, ballot < promised | same, Refused
@pytest.mark.parametrize(("epoch", "term"), [(2, 1), (2, 9), (3, 0)])
def test_an_older_ballot_is_refused_by_a_running_member(running: Member, epoch: int, term: int) -> None:
    assert running.freeze(freeze(epoch, term)) == Refused(0, term, 3)
    assert not running.frozen
    assert running.promised == (3, 1)


def test_an_older_ballot_is_refused_by_a_frozen_member(running: Member) -> None:
    running.freeze(freeze(5, 2))
    assert running.freeze(freeze(5, 1)) == Refused(0, 1, 5)
    assert running.frozen


# running | Freeze, ballot = promised | running, Refused
def test_a_late_freeze_of_the_view_in_force_is_refused(running: Member) -> None:
    assert running.freeze(freeze(3)) == Refused(0, 1, 3)
    assert not running.frozen


# frozen | Propose of the promised ballot | frozen, Accepted
def test_a_frozen_member_accepts_the_ballot_it_promised(running: Member) -> None:
    running.freeze(freeze(4))
    assert running.propose(propose(4)) == Accepted(0, 1, 4)
    assert running.accepted == view(4)
    assert running.frozen
    assert running.epoch == 3


# any | Propose of any other ballot | same, Refused
@pytest.mark.parametrize(("epoch", "term"), [(3, 1), (5, 1), (4, 2)])
def test_any_other_proposal_is_refused(running: Member, epoch: int, term: int) -> None:
    running.freeze(freeze(4))
    assert running.propose(propose(epoch, term)) == Refused(0, term, 4)
    assert running.accepted == view(3)


def test_a_running_member_refuses_proposals(running: Member) -> None:
    assert running.propose(propose(3)) == Refused(0, 1, 3)


# frozen | Install of the accepted view, or proof of it | running
def test_the_accepted_view_may_be_installed_once(running: Member) -> None:
    running.freeze(freeze(4))
    running.propose(propose(4))
    assert running.may_install(4)
    assert running.install() == view(4)
    assert running.epoch == 4
    assert not running.frozen
    assert not running.may_install(4)


def test_nothing_is_installed_that_was_not_accepted(running: Member) -> None:
    running.freeze(freeze(4))
    assert not running.may_install(4)
    assert not running.may_install(3)
    running.propose(propose(4))
    assert not running.may_install(5)


def test_an_accepted_view_is_not_installed_after_a_newer_promise(running: Member) -> None:
    running.freeze(freeze(4))
    running.propose(propose(4))
    running.freeze(freeze(5, 2))
    assert not running.may_install(4)
    assert not running.may_install(5)
    status = running.status(2, 5, 7, (8, (), 0), Ended(""), behind=False)
    assert (status.accepted, status.installed, status.promised) == (view(4), view(3), 5)
    assert (status.term, status.epoch, status.committed, status.complete) == (2, 5, 7, 8)
