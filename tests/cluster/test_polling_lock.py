"""Which thread polls while a step is waited for, and what signals and bugs do to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import jobs
import numpy as np
import pytest

import bml
from bml.errors import InvariantError
from bml.io.poller import READ, Poller
from bml.io.polling_lock import PollingLock

_SOON_S = 5.0


def test_the_loop_rests_while_another_thread_polls() -> None:
    poller = Poller()
    polling_lock = PollingLock(poller)
    reader, writer = os.pipe()
    poller.add(reader, READ, lambda events: None)
    rested = threading.Event()
    polling_lock.take()
    os.write(writer, b"x")
    thread = threading.Thread(target=lambda: (polling_lock.rest(_SOON_S), rested.set()))
    thread.start()
    assert poller.poll(_SOON_S) == 1, "who has the polling lock sees what comes"
    assert not rested.wait(0.05), "and the other does not"
    polling_lock.give()
    assert rested.wait(_SOON_S), "until the polling lock is given back"
    thread.join()
    with polling_lock:
        polling_lock.close()
        poller.close()
    polling_lock.take()  # a thread that comes too late is not harmed
    polling_lock.give()
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_an_interrupt_in_a_step_leaves_a_server_that_can_say_so() -> None:
    def train(session: bml.Session) -> float:
        if session.server != 0:
            session.barrier()
            time.sleep(1.0)
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

            session._communicator._shell.core.received = broken
        while True:
            session.allreduce(np.ones(3))

    with pytest.raises(InvariantError, match="a bug"):
        jobs.launch(train, "bcube:2x1")
