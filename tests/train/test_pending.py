"""The queue of steps: in order, errors for all that follow, calls by the training thread."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from bml.topology.errors import UsageError
from bml.train.calls import Calls
from bml.train.pending import CollectiveQueue, Pending

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def steps() -> Iterator[CollectiveQueue]:
    made = CollectiveQueue(nullcontext)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "bml-steps"]


def same(value: Any) -> Any:
    return value


def test_steps_are_done_in_order_beside_the_training_thread(steps: CollectiveQueue) -> None:
    go, seen = threading.Event(), []

    def work(number: int) -> int:
        go.wait()
        seen.append(number)
        return 10 * number

    handles = [
        steps.begin(lambda number=number: work(number), lambda value: value + 1) for number in range(3)
    ]
    assert not any(handle.done for handle in handles)
    go.set()
    assert [handle.wait() for handle in handles] == [1, 11, 21]
    assert handles[0].wait() == 1, "it may be asked again"
    assert seen == [0, 1, 2]
    assert steps.n_owed == 0


def test_waiting_for_the_last_finishes_those_before_it(steps: CollectiveQueue) -> None:
    finished: list[int] = []

    def finish(number: int) -> int:
        finished.append(number)
        return number

    handles = [steps.begin(lambda number=number: number, finish) for number in range(4)]
    assert handles[2].wait() == 2
    assert finished == [0, 1, 2]
    assert steps.n_owed == 3, "only its own wait gives a result to the training function"
    assert steps.run(lambda: 9, finish) == 9, "a blocking step comes after all that were begun"
    assert finished == [0, 1, 2, 3, 9]


def test_an_error_is_that_of_all_later_steps(steps: CollectiveQueue) -> None:
    done: list[int] = []
    first = steps.begin(lambda: 1 // 0, same)
    second = steps.begin(lambda: done.append(1), same)
    for handle in (second, first):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert done == []


def test_calls_are_done_by_whoever_waits_for_any_step(steps: CollectiveQueue) -> None:
    me = threading.current_thread()

    def work() -> bool:
        return steps.ask(threading.current_thread) is me and threading.current_thread() is not me

    handles = [steps.begin(work, same) for _ in range(3)]
    assert handles[2].wait()
    assert handles[0].wait()
    assert steps.run(lambda: steps.ask(lambda: 5), same) == 5


def test_an_error_in_such_a_call_is_that_of_its_step(steps: CollectiveQueue) -> None:
    def wrong() -> None:
        raise UsageError("wrong shape")

    handle = steps.begin(lambda: steps.ask(wrong), same)
    with pytest.raises(UsageError, match="wrong shape"):
        handle.wait()


def test_closing_ends_a_call_that_nobody_makes() -> None:
    steps = CollectiveQueue(nullcontext)
    handle = steps.begin(lambda: steps.ask(lambda: 1), same)
    steps.close()
    assert handle.done
    with pytest.raises(UsageError, match="without waiting"):
        handle.wait()
    with pytest.raises(UsageError, match="has ended"):
        steps.begin(lambda: 1, same)


def test_a_contribution_is_let_go_when_its_step_is_over(steps: CollectiveQueue) -> None:
    import weakref

    class Vector(np.ndarray[Any, Any]):
        pass

    vector = np.zeros(3).view(Vector)
    seen = weakref.ref(vector)
    handle = steps.begin(lambda vector=vector: float(vector.sum()), same)
    del vector
    assert handle.wait() == 0.0
    assert seen() is None


class TimeIsUp(BaseException):
    """A signal's handler raises it in a `wait`."""


@pytest.mark.parametrize("of_a_batch", [False, True])
def test_a_result_that_an_exception_kept_from_the_user_is_owed(of_a_batch: bool) -> None:
    # A handler may raise in every call of a wait, though another wait has finished the step before.
    n_calls = 0
    given = None
    while given is None:
        n_calls += 1
        calls = Calls()
        steps = CollectiveQueue(calls.later)
        whole: list[Pending] = []
        for number in range(2):
            whole.append(steps.begin(lambda number=number: number, same, whole if of_a_batch else None))
        assert whole[1].wait() == 1
        with suppress(TimeIsUp):
            given = _interrupted(whole[0].wait, n_calls)
        steps.close()
        if given is None:
            assert steps.n_owed == 1, f"the loop would go on without a result after call {n_calls}"
    assert (given, steps.n_owed) == (0, 0)
    assert n_calls > 5


def _interrupted(wait: Callable[[], int], n_calls: int) -> int:
    """Call `wait`, raising in the n-th call in it, where Python would let a signal's handler raise."""
    left = n_calls

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_return") and frame.f_code is not _interrupted.__code__
        if left == 0:
            left = -1
            raise TimeIsUp

    gc.disable()  # it would raise in callbacks of what is collected meanwhile, where nobody sees it
    sys.setprofile(look)
    try:
        return wait()
    finally:
        sys.setprofile(None)
        gc.enable()
