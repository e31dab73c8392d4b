"""The poller: stale events, timers, wake-ups, and no descriptor left open."""

import os
import threading

import pytest
from descriptors import opened
from wires import until

from bml.io.poller import READ, Poller


@pytest.fixture
def poller():
    before = opened()
    with_poller = Poller()
    yield with_poller
    with_poller.close()
    with_poller.close()
    assert opened() == before


def test_a_removed_descriptor_is_not_called_in_the_same_pass(poller: Poller) -> None:
    pipes = [os.pipe() for _ in range(2)]
    called = []

    def callback(me: int, other: int):
        def run(events: int) -> None:
            called.append(me)
            poller.remove(other)

        return run

    for me, other in ((0, 1), (1, 0)):
        poller.add(pipes[me][0], READ, callback(me, pipes[other][0]))
        os.write(pipes[me][1], b"x")
    assert poller.poll(1) == 2
    assert len(called) == 1
    for ends in pipes:
        for fd in ends:
            poller.remove(fd)
            os.close(fd)


def test_a_number_used_again_in_the_same_pass_is_another_descriptor(poller: Poller) -> None:
    pipes = [os.pipe() for _ in range(2)]
    spare = os.pipe()
    called = []

    def first(events: int) -> None:
        called.append("old")
        for read_end, _ in pipes:
            poller.remove(read_end)
        for read_end, _ in pipes:
            os.dup2(spare[0], read_end)
            poller.add(read_end, READ, lambda events: called.append("new"))

    for read_end, write_end in pipes:
        poller.add(read_end, READ, first)
        os.write(write_end, b"x")
    poller.poll(1)
    assert called == ["old"]
    poller.poll(0)
    assert called == ["old"]
    for ends in (*pipes, spare):
        for fd in ends:
            poller.remove(fd)
            os.close(fd)


def test_timers_run_in_order_and_can_be_cancelled(poller: Poller) -> None:
    ran = []
    poller.after(0.02, lambda: ran.append("b"))
    poller.after(0.01, lambda: ran.append("a"))
    poller.after(0.01, lambda: ran.append("never")).cancel()
    until(poller, lambda: len(ran) == 2, "two timers")
    assert ran == ["a", "b"]


def test_soon_runs_before_waiting_and_survives_an_exception(poller: Poller) -> None:
    ran = []

    def fail() -> None:
        raise RuntimeError("on purpose")

    poller.soon(fail)
    poller.soon(lambda: ran.append(1))
    with pytest.raises(RuntimeError):
        poller.poll(10)
    poller.poll(0)
    assert ran == [1]


def test_wake_from_another_thread() -> None:
    woken: list[int] = []
    poller = Poller(lambda: woken.append(1))
    thread = threading.Thread(target=poller.wake)
    thread.start()
    until(poller, lambda: woken, "the wake-up")
    thread.join()
    for _ in range(3):
        poller.wake()
    poller.poll(1)
    assert len(woken) == 2
    poller.close()
    poller.wake()
