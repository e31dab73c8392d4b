"""A joiner's own part in its joining: which results are kept, and when the state counts as here."""

from __future__ import annotations

import numpy as np
import pytest

from bml.cluster.steps.handover import Handover
from bml.errors import FabricError, TooSlow
from bml.protocol.server.events import (
    AllocateState,
    BufferResult,
    DiscardResult,
    Instruction,
    ResultsDropped,
    StateComplete,
    Submit,
    Tell,
)
from bml.protocol.server.kept_results import KeptResults
from bml.protocol.server.learner import KEPT_NBYTES, Learner
from bml.protocol.server.transfer import OutgoingPart, Part, cut
from bml.protocol.wire.call import Call
from bml.protocol.wire.frame import Header, Kind
from bml.protocol.wire.messages import CaughtUp, View
from bml.train.communicator import Committed

ME, DONOR = 2, 0
STATE = b"training state"
PART = Part(0, 1, 64)
CALL = Call("sum", "<f8", 3, "allreduce sum")


def view(epoch: int, commit: int = 4) -> View:
    return View(epoch, (0, 1, 2), (), commit, "", 0.5, learners=(2,))


def learner(epoch: int = 3, most_nbytes: int = KEPT_NBYTES) -> Learner:
    made = Learner(ME, most_nbytes)
    made.install(view(epoch))
    return made


def state_comes(to: Learner, boundary: int, committed: int, epoch: int = 3) -> list[Instruction]:
    """A donor gives the whole state after step `boundary`; this server has committed so many."""
    (head,), _ = cut(memoryview(STATE), [OutgoingPart(ME, 0, PART)])
    text = head.encode()
    announced = Header(Kind.HEAD, epoch, boundary, DONOR, ME, 0, 0, len(text), len(text))
    done = to.received(announced, text.decode(), committed)
    piece = Header(Kind.STATE, epoch, boundary, DONOR, ME, 0, 0, len(STATE), len(STATE))
    if to.admits(piece):
        done += to.received(piece, "", committed)
    return done


def keep(to: Learner, step: int) -> Submit:
    submit = Submit(step, 3, CALL, 7)
    (kept,) = to.keeps(submit, 3, (0, 1))
    assert isinstance(kept, BufferResult)
    return submit


def follow(to: Learner, step: int) -> list[type]:
    """A followed step is committed: returns the instructions for its result."""
    return [type(each) for each in to.keeps(Submit(step, 3, CALL, 7), 3, (0, 1))]


def test_a_state_that_overtakes_the_own_commit_is_here_when_the_step_is_committed() -> None:
    joiner = learner()
    assert [type(each) for each in state_comes(joiner, boundary=5, committed=4)] == [AllocateState]
    assert not joiner.has_state
    late = keep(joiner, 5)
    (here,) = joiner.state(5)
    assert isinstance(here, StateComplete)
    assert here.step == 5
    assert joiner.has_state
    assert not joiner.has(late.step), "it is in the state, and kept no more"


def test_a_state_that_comes_after_the_commit_is_here_at_once() -> None:
    joiner = learner()
    kept = [keep(joiner, step) for step in (5, 6)]
    assert [type(each) for each in state_comes(joiner, 5, committed=6)] == [AllocateState, StateComplete]
    assert joiner.has(6)
    assert joiner.differs(kept[1]) is None
    assert joiner.state(7) == []


def test_a_view_change_loses_half_a_state_and_no_whole_one() -> None:
    half, whole = learner(), learner()
    (head,), _ = cut(memoryview(STATE), [OutgoingPart(ME, 0, PART)])
    text = head.encode()
    half.received(Header(Kind.HEAD, 3, 5, DONOR, ME, 0, 0, len(text), len(text)), text.decode(), 4)
    state_comes(whole, 5, committed=4)
    for each in (half, whole):
        each.install(view(4, commit=5))
    assert whole.state(5) != []
    assert half.state(5) == []
    comes = state_comes(half, 6, committed=6, epoch=4)
    assert [type(each) for each in comes] == [AllocateState, StateComplete]


def test_a_result_that_comes_later_than_the_state_it_is_in_is_not_kept() -> None:
    handover = Handover(joins=True)
    handover.expect(1)
    for step in (4, 5, 6):
        if step == 6:
            handover.here(5, {})
        handover.keep(Committed(step, 3, (0, 1), np.zeros(3)))
    handover.keep(Committed(5, 3, (0, 1), np.zeros(3)))
    assert handover.keeps == (6,)


TWO = 2 * 3 * 8
"""Bytes of the results of two steps."""


def test_a_learner_that_keeps_too_much_falls_behind_and_is_given_a_later_state() -> None:
    joiner = learner(most_nbytes=TWO)
    state_comes(joiner, 5, committed=5)
    assert [follow(joiner, step) for step in (6, 7, 8, 9)] == [
        [BufferResult],
        [BufferResult],
        [DiscardResult, ResultsDropped],
        [DiscardResult],
    ]
    assert not joiner.has_state
    assert not joiner.admits(Header(Kind.STATE, 3, 9, DONOR, ME, 0, 0, 14, 14)), "of a transfer that is over"
    joiner.install(view(4, commit=8))
    assert joiner.behind, "the user is in the middle of an iteration"
    joiner.waits = True
    joiner.install(view(5, commit=9))
    assert [follow(joiner, step) for step in (10, 11)] == [[BufferResult], [BufferResult]]
    comes = state_comes(joiner, 10, committed=11, epoch=5)
    assert [type(each) for each in comes] == [AllocateState, StateComplete]
    assert [joiner.has(step) for step in (6, 7, 8, 9, 10, 11)] == [True, True, False, False, False, True]
    assert follow(joiner, 12) == [BufferResult]
    assert follow(joiner, 13) == [DiscardResult, ResultsDropped]


def test_results_that_were_applied_make_room() -> None:
    joiner = learner(most_nbytes=TWO)
    state_comes(joiner, 5, committed=5)
    for step in range(6, 40):
        submit = keep(joiner, step)
        assert joiner.has(step)
        assert joiner.differs(submit) is None


def test_one_result_is_kept_however_long_it_is() -> None:
    joiner = learner(most_nbytes=1)
    assert follow(joiner, 6) == [BufferResult]
    assert follow(joiner, 7) == [DiscardResult, ResultsDropped]


def test_a_learner_that_is_always_slower_gives_up_after_the_fourth_state() -> None:
    joiner = learner(most_nbytes=TWO)
    step = 5
    for epoch in (3, 4, 5, 6):
        state_comes(joiner, step, committed=step, epoch=epoch)
        follow(joiner, step + 1)
        follow(joiner, step + 2)
        if epoch < 6:
            assert follow(joiner, step + 3) == [DiscardResult, ResultsDropped]
            joiner.waits = True
            joiner.install(view(epoch + 1, commit=step + 3))
        step += 4
    with pytest.raises(TooSlow, match=r"4 times.*session\.replays.*kept_mib"):
        follow(joiner, step - 1)


def test_results_that_a_user_still_comes_to_outlive_the_state_that_he_will_take() -> None:
    kept: KeptResults[str] = KeptResults()
    kept.here(5)
    kept.took()
    for step in (6, 7):
        kept.keep(step, "for the iteration that it is in")
    kept.behind(8)
    for step in (10, 11, 12):
        kept.keep(step, "for the later state")
    kept.here(11)
    kept.keep(10, "late")
    assert kept.steps == (6, 7, 12)
    assert kept.pop(6) == "for the iteration that it is in"
    kept.took()
    assert kept.steps == (12,)


def test_results_after_a_state_that_was_not_taken_are_lost_with_it() -> None:
    kept: KeptResults[str] = KeptResults()
    for step in (4, 5, 6):
        kept.keep(step, "")
    kept.here(4)
    kept.behind(7)
    assert kept.steps == ()
    kept.keep(9, "")
    kept.here(8)
    kept.took()
    assert kept.steps == (9,)


def level(committed: int = 6) -> Learner:
    """A learner whose user has been level once, and goes through the iteration from the next step on."""
    joiner = learner()
    assert joiner.arrived(committed + 1, committed, frozen=False).replays, "once more, to draw level"
    assert not joiner.arrived(committed + 2, committed + 1, frozen=False).replays
    return joiner


def test_a_learner_whose_user_replays_must_not_contribute_whatever_it_said_before() -> None:
    joiner = level(committed=6)
    assert joiner.progress(3, 8, brought=False) == [Tell(CaughtUp(ME, 3))]
    assert not joiner.late
    assert joiner.arrived(10, 10, frozen=False).replays, "the others have been faster"
    assert joiner.late
    assert joiner.progress(3, 11, brought=True) == []
    assert not joiner.arrived(12, 11, frozen=False).replays
    assert not joiner.late


def test_a_user_contributes_all_of_an_iteration_that_begins_while_a_view_is_made() -> None:
    joiner = level(committed=6)
    assert not joiner.arrived(10, 12, frozen=True).replays
    assert not joiner.late
    joiner.install(View(4, (0, 1, 2), (), 12, "", 0.5))
    assert not joiner.arrived(14, 13, frozen=False).replays, "it contributes"
    assert not joiner.late


def test_a_user_that_waits_for_a_state_is_told_when_it_is_overtaken() -> None:
    handover = Handover(joins=True)
    handover.expect(1)
    handover.here(5, {})
    handover.behind(7)
    assert handover.take() is None
    assert handover.needs_state, "and asks again"
    handover.fail(FabricError("the job is over"))
    with pytest.raises(FabricError):
        handover.take()
