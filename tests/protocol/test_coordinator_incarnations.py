"""A coordinator across incarnations and takeovers: what it must forget, and what it must not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from test_coordinator_table import TIMES, Driver, message, posts, takeover

from bml.protocol.coordinator import core as coord
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import Incarnation

COMER = 2


def agree(driver: Driver) -> list[coord.Instruction]:
    """Every server that is asked answers, accepts and installs."""
    driver.answer()
    done = driver.accept()
    driver.installed()
    return done


def lose(driver: Driver, server: int = COMER) -> None:
    """A server dies, and a view without it comes in force."""
    driver.die(server)
    agree(driver)
    assert server not in driver.core.members


def all_can_send_state(driver: Driver) -> list[coord.Instruction]:
    """All members can send the state to joiners."""
    return [each for server in driver.core.members for each in driver.heard(server, msg.CanSendState(server))]


def comes_again(driver: Driver, number: int = 1) -> list[coord.Instruction]:
    """The process of COMER was started again, and answers Who."""
    driver.at[COMER].update(promised=0, installed=None, accepted=None, incarnation=Incarnation(COMER, number))
    return driver.appear(COMER)


def contributes(driver: Driver) -> list[coord.Instruction]:
    """COMER joins, catches up, and is a contributor; returns the messages beside the last view."""
    comes_again(driver)
    agree(driver)
    assert driver.core.view is not None
    assert driver.core.view.learners == (COMER,)
    driver.heard(COMER, msg.CaughtUp(COMER, driver.core.view.epoch))
    done = agree(driver)
    assert driver.core.contributors == tuple(driver.fabric.servers)
    return done


@pytest.fixture
def without() -> Driver:
    """A job of nine that has lost COMER; all others can send the state."""
    driver = Driver("bcube:3x2").start()
    lose(driver)
    all_can_send_state(driver)
    return driver


# --- takeover --------------------------------------------------------------------------------------


def test_a_suspicion_that_was_told_while_it_gathered_is_acted_on() -> None:
    """Or the servers that cannot hear each other wait for ever: they do not say it again."""
    old = Driver("bcube:3x2").start()
    new = takeover(old)
    new.appear(*range(8))
    for observer in (3, 5):
        assert new.heard(observer, msg.Suspect(observer, 4, 0, "silence", 0.6, "nothing heard")) == []
    assert posts(msg.Freeze, new.appear(8)) == []
    assert new.core.state == "steady"
    assert new.core.next_deadline(new.now) <= new.now + TIMES.silence_window_s
    done = new.tick(TIMES.silence_window_s)
    assert posts(msg.Freeze, done) == list(range(9))
    assert "NIC 4/0 is silent" in message(msg.Freeze, done).reason


def taken_over(driver: Driver) -> Driver:
    """A coordinator that takes over from this one, and was started when COMER was not there."""
    new = takeover(driver)
    new.core = coord.Coordinator(new.fabric, new.term, TIMES, None, new.now, absent=(COMER,))
    return new


def says_first(driver: Driver, said: msg.ToCoordinator) -> list[coord.Instruction]:
    """COMER is the first to answer Who, and says this before its Status; the others follow."""
    assert posts(msg.Who, driver.give(coord.Connected(COMER))) == [COMER]
    done = driver.heard(COMER, said)
    done += driver.heard(COMER, driver.status(COMER))
    return done + driver.appear(*(server for server in driver.fabric.servers if server != COMER))


def test_a_suspicion_of_a_joiner_reaches_a_coordinator_that_did_not_know_it(without: Driver) -> None:
    """Or both ends of a broken connection wait for ever: they do not say it again."""
    contributes(without)
    new = taken_over(without)
    says_first(new, msg.Suspect(COMER, 1, 0, "reset", 0.0, "the connection broke"))
    assert new.core.state == "steady"
    done = new.tick(TIMES.silence_window_s)
    assert posts(msg.Freeze, done) == list(range(9))
    assert "NIC 1/0 was reset towards 2" in message(msg.Freeze, done).reason


@pytest.mark.parametrize("said", [msg.CaughtUp, msg.NeedsState])
def test_a_report_of_a_learner_before_its_status_is_about_the_view_in_force(
    without: Driver, said: type[msg.CaughtUp | msg.NeedsState]
) -> None:
    comes_again(without)
    agree(without)
    assert without.core.view is not None
    done = says_first(taken_over(without), said(COMER, without.core.view.epoch))
    assert posts(msg.Freeze, done) == list(range(9))
    assert "server 2" in message(msg.Freeze, done).reason


def test_a_joiner_that_leaves_is_known_to_a_new_coordinator(without: Driver) -> None:
    """It would be evicted although the view has it, and no coordinator would make another one."""
    contributes(without)
    done = says_first(taken_over(without), msg.Leaves(COMER, "it was asked to"))
    others = [server for server in range(9) if server != COMER]
    assert posts(msg.Evict, done) == []
    assert posts(msg.Freeze, done) == others


def test_a_suspicion_that_is_withdrawn_before_the_status_does_not_count() -> None:
    driver = Driver("bcube:3x2").start()
    driver.give(coord.Connected(3))
    driver.heard(3, msg.Suspect(3, 4, 0, "silence", 0.6, "nothing heard"))
    driver.heard(3, msg.Withdraw(3, 4, 0))
    driver.heard(3, driver.status(3))
    assert driver.tick(1.0) == []


def test_a_failure_that_is_told_before_the_status_ends_the_job_once() -> None:
    driver = Driver("bcube:3x2").start()
    driver.give(coord.Connected(3))
    assert driver.heard(3, msg.Ended(3, "failed", "ValueError: no", 1)) == []
    done = driver.heard(3, driver.status(3, outcome="failed", error="ValueError: no"))
    assert posts(msg.Abort, done) == list(range(9))
    assert [each for each in done if isinstance(each, coord.Finished)] == done[-1:]


# --- a server that comes again ---------------------------------------------------------------------


def test_the_end_of_an_earlier_incarnation_does_not_end_the_job() -> None:
    driver = Driver("bcube:3x2").start()
    driver.heard(COMER, msg.Ended(COMER, "done", "", 3))
    lose(driver)
    all_can_send_state(driver)
    contributes(driver)
    others = [server for server in driver.fabric.servers if server != COMER]
    for server in others:
        done = driver.heard(server, msg.Ended(server, "done", "", 9))
        assert posts(msg.Shutdown, done) == [], "server 2 is not done in this incarnation"
    assert posts(msg.Shutdown, driver.heard(COMER, msg.Ended(COMER, "done", "", 9)))


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("is_known_dead", [False, True])
def test_a_joiner_that_fails_while_the_view_has_its_predecessor_ends_no_job(
    is_known_dead: bool, ready: bool
) -> None:
    """It is forked in less time than passes between the news of a death and the view without the dead."""
    driver = Driver("bcube:3x2").start()
    all_can_send_state(driver)
    if is_known_dead:
        driver.give(coord.Gone(COMER, "it was killed"))
    driver.at[COMER]["ready"] = ready  # it has asked to be let in, or fails before
    comes_again(driver)
    assert COMER in driver.core.contributors
    done = driver.heard(COMER, msg.Ended(COMER, "failed", "InvariantError: step 15, 14 is next", 0))
    assert posts(msg.Abort, done) == []
    assert posts(msg.Returned, done) == []
    driver.give(coord.Gone(COMER, "it has ended"))
    driver.tick(TIMES.silence_window_s)
    agree(driver)
    others = tuple(server for server in driver.fabric.servers if server != COMER)
    assert (driver.core.state, driver.core.members) == ("steady", others)
    driver.at[COMER]["ready"] = True
    comes_again(driver, 2)
    agree(driver)
    assert driver.core.view is not None
    assert driver.core.view.learners == (COMER,)


@pytest.mark.parametrize("outcome", ["failed", "done"])
def test_a_joiner_that_ends_before_its_status_ends_no_job(outcome: str) -> None:
    """The coordinator had not asked it yet; the view has its predecessor."""
    driver = Driver("bcube:3x2").start()
    all_can_send_state(driver)
    driver.at[COMER].update(promised=0, installed=None, accepted=None, incarnation=Incarnation(COMER, 1))
    driver.give(coord.Connected(COMER))
    done = driver.heard(COMER, msg.Ended(COMER, outcome, "why", 0))
    done += driver.heard(COMER, driver.status(COMER, outcome=outcome, error="why"))
    assert posts(msg.Abort, done) == posts(msg.Returned, done) == []
    assert posts(msg.Evict, done) == [COMER]
    assert driver.core.state == "steady"


def test_the_return_of_an_earlier_incarnation_is_told_to_no_server() -> None:
    """It would be a StepMismatch: step 9, but server 2 returned after step 3."""
    driver = Driver("bcube:3x2").start()
    assert posts(msg.Returned, driver.heard(COMER, msg.Ended(COMER, "done", "", 3))) == list(range(9))
    lose(driver)
    all_can_send_state(driver)
    assert posts(msg.Returned, contributes(driver)) == []
    assert posts(msg.Returned, driver.give(coord.Connected(0))) == []


def test_a_lost_server_joins_after_another_came_back_without_the_view(without: Driver) -> None:
    without.at[1].update(installed=None, accepted=None)
    without.appear(1)
    assert posts(msg.Freeze, without.tick(TIMES.proof_window_s))
    agree(without)
    assert COMER in posts(msg.Freeze, comes_again(without))


def test_a_link_heals_after_a_server_came_back_without_the_view() -> None:
    driver = Driver("bcube:3x2").start()
    for observer in (3, 5):
        driver.heard(observer, msg.Suspect(observer, 4, 0, "silence", 0.6, "nothing heard"))
    driver.tick(TIMES.silence_window_s)
    agree(driver)
    assert driver.core.view is not None
    assert driver.core.view.failures == ("link:4/0",)
    driver.at[1].update(installed=None, accepted=None)
    driver.appear(1)
    driver.tick(TIMES.proof_window_s)
    agree(driver)
    for observer, peer in ((3, 4), (5, 4), (4, 3), (4, 5)):
        done = driver.heard(observer, msg.Healthy(observer, peer, 0))
    assert posts(msg.Freeze, done) == list(range(9))


# --- a joiner that is lost -------------------------------------------------------------------------


def test_a_joiner_that_dies_while_it_waits_is_asked_for_nothing() -> None:
    driver = Driver("bcube:3x2").start()
    lose(driver)
    assert posts(msg.Freeze, comes_again(driver)) == [], "no server can send it the state yet"
    assert driver.core.waiting == (COMER,)
    assert driver.give(coord.Gone(COMER, "killed")) == []
    assert driver.core.waiting == ()
    assert posts(msg.Freeze, all_can_send_state(driver)) == []


def test_a_joiner_that_dies_while_it_is_let_in_is_left_out_at_once(without: Driver) -> None:
    comes_again(without)
    done = without.give(coord.Gone(COMER, "killed"))
    assert posts(msg.Freeze, done) == [0, 1, 3, 4, 5, 6, 7, 8]
    agree(without)
    assert without.tick(1.0) == []


def test_a_joiner_that_does_not_answer_is_not_asked_again(without: Driver) -> None:
    without.heard(0, msg.Progress(0, 2))
    comes_again(without)
    without.answer(*(server for server in without.asked() if server != COMER))
    done = without.tick(TIMES.answer_s)
    assert posts(msg.Freeze, done) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert without.core.waiting == ()
    agree(without)
    assert without.tick(1.0) == []


def test_a_joiner_that_accepts_too_late_is_let_in_when_it_asks_again(without: Driver) -> None:
    without.heard(0, msg.Progress(0, 2))
    comes_again(without)
    without.answer()
    proposal, epoch = without.ballot.proposal, without.core._known.epoch
    without.accept(*(server for server in without.asked() if server != COMER))
    assert posts(msg.Freeze, without.tick(TIMES.answer_s)) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert without.heard(COMER, msg.Accepted(COMER, without.term, epoch)) == [], "that view is given up"
    assert COMER in posts(msg.Evict, agree(without))
    without.at[COMER]["accepted"] = proposal
    assert COMER in posts(msg.Freeze, without.heard(COMER, without.status(COMER)))
    agree(without)
    assert COMER in without.core.members


def test_a_learner_that_caught_up_in_an_older_view_has_not_in_this(without: Driver) -> None:
    """The step that it had followed may have been tried again since."""
    comes_again(without)
    agree(without)
    assert without.core.view is not None
    epoch = without.core.view.epoch
    assert without.heard(COMER, msg.CaughtUp(COMER, epoch - 1)) == []
    assert without.tick(1.0) == []
    assert posts(msg.Freeze, without.heard(COMER, msg.CaughtUp(COMER, epoch)))


def test_a_zombie_of_an_earlier_incarnation_is_evicted_and_disturbs_no_view_change(without: Driver) -> None:
    zombie = without.status(COMER, incarnation=None, promised=1, accepted=None)
    contributes(without)

    def says(**other: Any) -> tuple[list[int], list[int]]:
        done = without.heard(COMER, structs.replace(zombie, **other))
        return posts(msg.Evict, done), posts(msg.Freeze, done)

    view = without.core.view
    assert says(installed=view) == ([COMER], [])
    assert says(installed=view, promised=50) == ([COMER], []), "nothing is under way that its promise refuses"
    without.die(8)
    epoch = without.core._known.epoch
    assert says(installed=view) == ([COMER], []), "all that were asked go on to answer"
    assert without.core._known.epoch == epoch
    assert says(installed=view, promised=90) == ([COMER], [0, 1, 2, 3, 4, 5, 6, 7])
    assert without.core._known.epoch == 91
