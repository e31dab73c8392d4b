"""Calls that the thread of a group asks of the training thread, where a handler of a signal may raise."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch")

from bml.torch.recomputing import training_thread
from bml.torch.recomputing.training_thread import TrainingThread
from bml.torch.work import GroupWork

WITHIN_S = 20.0


class TimeIsUp(BaseException):
    """A signal's handler raises it."""


class RaisesAfter:
    """Raises before the instruction number `n` of our functions that the training thread carries out."""

    def __init__(self, n: int):
        self.n_left = n

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != training_thread.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.n_left -= 1
            if not self.n_left:
                raise TimeIsUp
        return self


def asked_while_a_handler_raises(n: int, waits: bool) -> tuple[bool, list[object]]:
    """Whether it raised at all, and what the thread of the group got for its call, result or error."""
    thread, work, got = TrainingThread(), GroupWork("all_reduce", [], 60.0), list[object]()

    def ask() -> None:
        try:
            got.append(thread.ask(lambda: "computed"))
        except BaseException as error:
            got.append(error)
        work.settle(None)

    asking = threading.Thread(target=ask)
    asking.start()
    while thread._asked.empty():
        assert asking.is_alive()
    traced = sys.gettrace()
    sys.settrace(RaisesAfter(n))
    try:
        thread.wait_for([work]) if waits else thread.serve()
        raised = False
    except TimeIsUp:
        raised = True
    finally:
        sys.settrace(traced)
    if raised:
        thread.leave()
    asking.join(WITHIN_S)
    assert not asking.is_alive(), f"the call was lost at instruction {n}"
    return raised, got


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_is_answered_wherever_a_handler_raises(waits: bool) -> None:
    n, raised = 0, True
    while raised:
        n += 1
        raised, (answer,) = asked_while_a_handler_raises(n, waits)
        assert answer == "computed" or isinstance(answer, BaseException)
    assert answer == "computed"
    assert n > 20
