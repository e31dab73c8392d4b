"""Who polls while a step is waited for, and what signals and bugs do to a thread that does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.cluster.baton import Baton, Deferral
from bml.errors import InvariantError
from bml.transport.poller import READ, Poller

_SOON_S = 5.0


class Interrupted(BaseException):
    """What the handlers of these tests raise."""


def interrupt(number: int, frame: Any) -> None:
    raise Interrupted


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


def test_the_loop_rests_while_another_thread_polls() -> None:
    poller = Poller()
    baton = Baton(poller)
    reader, writer = os.pipe()
    poller.add(reader, READ, lambda events: None)
    rested = threading.Event()
    baton.take()
    os.write(writer, b"x")
    thread = threading.Thread(target=lambda: (baton.rest(_SOON_S), rested.set()))
    thread.start()
    assert poller.poll(_SOON_S) == 1, "who has the baton sees what comes"
    assert not rested.wait(0.05), "and the other does not"
    baton.give()
    assert rested.wait(_SOON_S), "until the baton is given back"
    thread.join()
    with baton:
        baton.close()
        poller.close()
    baton.take()  # a thread that comes too late is not harmed
    baton.give()
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures("alarm")
def test_a_handler_that_raises_waits_for_the_end_of_the_block() -> None:
    poller = Poller()
    deferral = Deferral(poller.wake)
    seen = []

    def block() -> None:
        with deferral:
            signal.raise_signal(signal.SIGALRM)
            seen.append(deferral.came)
            seen.append(poller.poll(_SOON_S))  # who waits is woken

    with pytest.raises(Interrupted):
        block()
    assert seen == [True, 1]
    assert not deferral.came
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGALRM)
    deferral.close()
    assert signal.getsignal(signal.SIGALRM) is interrupt
    poller.close()


@pytest.mark.usefixtures("alarm")
def test_in_other_threads_nothing_is_put_off() -> None:
    deferral = Deferral(lambda: None)
    with deferral:
        pass  # handlers are adopted
    inside, leave = threading.Event(), threading.Event()

    def block() -> None:
        with deferral:
            inside.set()
            leave.wait(_SOON_S)

    thread = threading.Thread(target=block)
    thread.start()
    assert inside.wait(_SOON_S)
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGALRM)
    leave.set()
    thread.join()
    deferral.close()


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

    try:
        with deferral:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
            os.read(read, 1)
            os.kill(children[0], signal.SIGUSR1)
            _, status = os.waitpid(children[0], 0)
        assert os.waitstatus_to_exitcode(status) == 7
    finally:
        deferral.close()
        signal.signal(signal.SIGUSR1, before)
        os.close(read)
        os.close(write)


def test_an_interrupt_in_a_step_leaves_a_server_that_can_say_so() -> None:
    def train(session: bml.Session) -> float:
        if session.server != 0:
            session.barrier()
            time.sleep(0.3)
            return float(session.allreduce(np.ones(3))[0])
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(RuntimeError("time is up")))
        session.barrier()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return float(session.allreduce(np.ones(3))[0])

    with pytest.raises(bml.BmlError, match="server 0 raised RuntimeError: time is up"):
        jobs.launch(train, "bcube:2x1")


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_bug_that_shows_in_the_training_thread_ends_the_job_there() -> None:
    def train(session: Any) -> None:
        session.barrier()
        if session.server == 0:

            def broken(*_: Any) -> Any:
                raise ZeroDivisionError("a bug")

            session._communicator._loop.core.received = broken
        while True:
            session.allreduce(np.ones(3))

    with pytest.raises(InvariantError, match="a bug"):
        jobs.launch(train, "bcube:2x1")
