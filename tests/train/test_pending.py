"""The queue of steps: in order, errors for all that follow, errands in the training thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from bml.topology.errors import UsageError
from bml.train.pending import Steps

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def steps() -> Iterator[Steps]:
    made = Steps(nullcontext)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "bml-steps"]


def same(value: Any) -> Any:
    return value


def test_steps_are_done_in_order_beside_the_training_thread(steps: Steps) -> None:
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
    assert steps.pending == 0


def test_waiting_for_the_last_finishes_those_before_it(steps: Steps) -> None:
    finished: list[int] = []

    def finish(number: int) -> int:
        finished.append(number)
        return number

    handles = [steps.begin(lambda number=number: number, finish) for number in range(4)]
    assert handles[2].wait() == 2
    assert finished == [0, 1, 2]
    assert steps.run(lambda: 9, finish) == 9, "a blocking step comes after all that were begun"
    assert finished == [0, 1, 2, 3, 9]


def test_an_error_is_that_of_all_later_steps(steps: Steps) -> None:
    done: list[int] = []
    first = steps.begin(lambda: 1 // 0, same)
    second = steps.begin(lambda: done.append(1), same)
    for handle in (second, first):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert done == []


def test_errands_are_done_by_whoever_waits_for_any_step(steps: Steps) -> None:
    me = threading.current_thread()

    def work() -> bool:
        return steps.ask(threading.current_thread) is me and threading.current_thread() is not me

    handles = [steps.begin(work, same) for _ in range(3)]
    assert handles[2].wait()
    assert handles[0].wait()
    assert steps.run(lambda: steps.ask(lambda: 5), same) == 5


def test_an_error_in_an_errand_is_that_of_its_step(steps: Steps) -> None:
    def wrong() -> None:
        raise UsageError("wrong shape")

    handle = steps.begin(lambda: steps.ask(wrong), same)
    with pytest.raises(UsageError, match="wrong shape"):
        handle.wait()


def test_closing_ends_an_errand_that_nobody_does() -> None:
    steps = Steps(nullcontext)
    handle = steps.begin(lambda: steps.ask(lambda: 1), same)
    steps.close()
    assert handle.done
    with pytest.raises(UsageError, match="without waiting"):
        handle.wait()
    with pytest.raises(UsageError, match="has ended"):
        steps.begin(lambda: 1, same)


def test_a_contribution_is_let_go_when_its_step_is_over(steps: Steps) -> None:
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
    """What a handler of a signal raises in a `wait`."""
