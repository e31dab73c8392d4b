"""One call at a time, none after one that an exception left."""

from __future__ import annotations

import threading

import pytest

from bml.errors import SessionBroken, StepMismatch
from bml.topology.errors import UsageError
from bml.train.calls import Calls, warn_user


def test_an_exception_that_leaves_a_call_breaks_the_session() -> None:
    calls = Calls()
    with calls:
        pass
    with pytest.raises(KeyboardInterrupt), calls:
        raise KeyboardInterrupt
    for _ in range(2):
        with pytest.raises(SessionBroken, match="an exception KeyboardInterrupt left") as caught, calls:
            pytest.fail("it is entered")
        assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    with pytest.raises(SessionBroken), calls.later():
        pytest.fail("it is entered")


def test_the_jobs_error_is_raised_again_as_it_is() -> None:
    calls, error = Calls(), StepMismatch("they differ")
    with pytest.raises(StepMismatch), calls:
        raise error
    with pytest.raises(StepMismatch) as caught:
        calls.check()
    assert caught.value is error


def test_a_call_that_was_torn_is_not_taken_for_over() -> None:
    calls = Calls()
    calls.__enter__()  # and an exception comes before __exit__ has done anything
    with pytest.raises(SessionBroken, match="an exception left"), calls:
        pytest.fail("it is entered")


def test_a_second_thread_is_refused_by_name() -> None:
    calls, inside, over = Calls(), threading.Event(), threading.Event()

    def call() -> None:
        with calls:
            inside.set()
            over.wait(10)

    thread = threading.Thread(target=call, name="loader")
    thread.start()
    inside.wait(10)
    with pytest.raises(UsageError, match="while thread 'loader' is in a call"), calls:
        pytest.fail("it is entered")
    over.set()
    thread.join(10)
    with calls:
        pass


def test_recompute_may_make_no_call() -> None:
    calls = Calls()

    def call() -> None:
        with calls:
            pytest.fail("it is entered")

    with pytest.raises(UsageError, match="recompute or then called the session"), calls:
        calls.compute(call)


def test_a_program_without_a_name_is_warned_of_its_line() -> None:
    with pytest.warns(UserWarning, match="of what it does") as caught:
        exec(compile("\nwarn('of what it does')", "made.py", "exec"), {"warn": warn_user})
    assert [(each.filename, each.lineno) for each in caught] == [("made.py", 2)]
