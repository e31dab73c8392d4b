"""Handlers of signals that come in an unbroken function run after it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bml.cluster.steps.deferral import Deferral, unbroken
from bml.io.poller import Poller

_SOON_S = 5.0


class Interrupted(BaseException):
    """What the handlers of these tests raise."""


def interrupt(number: int, frame: Any) -> None:
    raise Interrupted


@pytest.fixture(params=[signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1])
def signalled(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal whose handler raises."""
    before = signal.signal(request.param, interrupt)
    yield request.param
    signal.signal(request.param, before)


@unbroken
def whole(function: Callable[[], Any]) -> None:
    function()


def run(deferral: Deferral, function: Callable[[], Any]) -> None:
    """As those do that call what is unbroken."""
    deferral.look()
    try:
        whole(function)
    finally:
        deferral.release()


def test_a_handler_that_raises_waits_for_the_end_of_the_function(signalled: int) -> None:
    poller = Poller()
    deferral = Deferral(poller.wake)
    seen = []

    def inside() -> None:
        signal.raise_signal(signalled)
        seen.append(len(deferral.came))
        seen.append(poller.poll(_SOON_S))  # who waits is woken

    with pytest.raises(Interrupted):
        run(deferral, inside)
    assert seen == [1, 1]
    assert not deferral.came
    with pytest.raises(Interrupted):
        signal.raise_signal(signalled)
    deferral.close()
    assert signal.getsignal(signalled) is interrupt
    poller.close()


def test_handlers_that_are_installed_later_wait_too(signalled: int) -> None:
    deferral, seen = Deferral(lambda: None), []
    run(deferral, lambda: None)
    ours = signal.signal(signalled, lambda number, frame: seen.append(number))
    run(deferral, lambda: (signal.raise_signal(signalled), seen.append(0)))
    assert seen == [0, signalled]
    signal.signal(signalled, ours)  # a library that had set a limit puts back what it found
    with pytest.raises(Interrupted):
        run(deferral, lambda: (signal.raise_signal(signalled), seen.append(1)))
    assert seen == [0, signalled, 1]
    deferral.close()
    assert signal.getsignal(signalled) is interrupt


def test_what_a_function_raises_comes_with_what_a_handler_raises(signalled: int) -> None:
    deferral = Deferral(lambda: None)

    def inside() -> None:
        signal.raise_signal(signalled)
        raise ValueError

    with pytest.raises(Interrupted) as raised:
        run(deferral, inside)
    assert isinstance(raised.value.__context__, ValueError)
    deferral.close()


def test_in_other_threads_nothing_is_put_off(signalled: int) -> None:
    deferral = Deferral(lambda: None)
    deferral.look()
    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=run, args=(deferral, lambda: (inside.set(), leave.wait(_SOON_S))))
    thread.start()
    assert inside.wait(_SOON_S)
    with pytest.raises(Interrupted):
        signal.raise_signal(signalled)
    leave.set()
    thread.join()
    deferral.close()
    assert signal.getsignal(signalled) is interrupt


def test_another_thread_may_close(signalled: int) -> None:
    """As a thread does that closes a group; the handlers stay with the main thread, and work."""
    poller, ends = Poller(), list[BaseException]()
    deferral = Deferral(poller.wake)
    run(deferral, lambda: None)

    def close() -> None:
        try:
            deferral.close()
        except ValueError as error:
            ends.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert ends == []
    with pytest.raises(Interrupted):
        signal.raise_signal(signalled)
    deferral.close()
    assert signal.getsignal(signalled) is interrupt
    poller.close()


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_child_that_another_thread_forks_puts_nothing_off() -> None:
    deferral = Deferral(lambda: None)
    read, write = os.pipe()
    before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    children: list[int] = []

    def fork() -> None:
        children.append(os.fork())
        if children[0] == 0:
            os.write(write, b"!")
            signal.pause()
            os._exit(0)

    def inside() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        os.read(read, 1)
        os.kill(children[0], signal.SIGUSR1)
        _, status = os.waitpid(children[0], 0)
        assert os.waitstatus_to_exitcode(status) == 7

    try:
        run(deferral, inside)
    finally:
        deferral.close()
        signal.signal(signal.SIGUSR1, before)
        os.close(read)
        os.close(write)
