"""A joiner's own part in its joining: which results are kept, and when the state counts as here."""

from __future__ import annotations

import numpy as np

from bml.cluster.handover import Handover
from bml.protocol.call import Call
from bml.protocol.events import Expect, Instruction, StateHere, Submit
from bml.protocol.frame import Header, Kind
from bml.protocol.learner import Learner
from bml.protocol.messages import View
from bml.protocol.transfer import Gift, Part, cut
from bml.train.communicator import Committed

ME, DONOR = 2, 0
STATE = b"training state"
PART = Part(0, 1, 64)
CALL = Call("sum", "<f8", 3, "allreduce sum")


def view(epoch: int, commit: int = 4) -> View:
    return View(epoch, (0, 1, 2), (), commit, "", 0.5, learners=(2,))


def learner(epoch: int = 3) -> Learner:
    made = Learner(ME)
    made.install(view(epoch))
    return made


def state_comes(to: Learner, boundary: int, committed: int, epoch: int = 3) -> list[Instruction]:
    """A donor gives the whole state after step `boundary`; this server has committed so many."""
    (head,), _ = cut(memoryview(STATE), [Gift(ME, 0, PART)])
    text = head.encode()
    announced = Header(Kind.HEAD, epoch, boundary, DONOR, ME, 0, 0, len(text), len(text))
    done = to.came(announced, text.decode(), committed)
    piece = Header(Kind.STATE, epoch, boundary, DONOR, ME, 0, 0, len(STATE), len(STATE))
    if to.admits(piece):
        done += to.came(piece, "", committed)
    return done


def keep(to: Learner, step: int) -> Submit:
    submit = Submit(step, 3, CALL, 7)
    to.keeps(submit)
    return submit


def test_a_state_that_overtakes_the_own_commit_is_here_when_the_step_is_committed() -> None:
    joiner = learner()
    assert [type(each) for each in state_comes(joiner, boundary=5, committed=4)] == [Expect]
    assert not joiner.has_state
    late = keep(joiner, 5)
    (here,) = joiner.state(5)
    assert isinstance(here, StateHere)
    assert here.step == 5
    assert joiner.has_state
    assert joiner.differs(late) == "something else", "it is in the state, and kept no more"


def test_a_state_that_comes_after_the_commit_is_here_at_once() -> None:
    joiner = learner()
    kept = [keep(joiner, step) for step in (5, 6)]
    assert [type(each) for each in state_comes(joiner, 5, committed=6)] == [Expect, StateHere]
    assert joiner.differs(kept[1]) is None
    assert joiner.state(7) == []


def test_a_view_change_loses_half_a_state_and_no_whole_one() -> None:
    half, whole = learner(), learner()
    (head,), _ = cut(memoryview(STATE), [Gift(ME, 0, PART)])
    text = head.encode()
    half.came(Header(Kind.HEAD, 3, 5, DONOR, ME, 0, 0, len(text), len(text)), text.decode(), 4)
    state_comes(whole, 5, committed=4)
    for each in (half, whole):
        each.install(view(4, commit=5))
    assert whole.state(5) != []
    assert half.state(5) == []
    assert [type(each) for each in state_comes(half, 6, committed=6, epoch=4)] == [Expect, StateHere]


def test_a_result_that_comes_later_than_the_state_it_is_in_is_not_kept() -> None:
    handover = Handover(joins=True)
    handover.expect(1)
    for step in (4, 5, 6):
        if step == 6:
            handover.here(5, {})
        handover.keep(Committed(step, 3, (0, 1), np.zeros(3)))
    handover.keep(Committed(5, 3, (0, 1), np.zeros(3)))
    assert handover.keeps == (6,)
