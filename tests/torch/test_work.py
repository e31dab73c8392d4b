"""The thread of a process group: limits of time, for those that wait for futures, too."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bml.errors import ContributorLost  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.messages import Messages  # noqa: E402
from bml.torch.work import GroupWork, WorkThread  # noqa: E402


def test_futures_end_in_time_as_waits_do() -> None:
    """DDP waits for futures alone, and a rank may be alive and call nothing."""
    thread, comes = WorkThread("test"), threading.Event()

    def job() -> int:
        comes.wait()
        return -1

    begun_s = time.monotonic()
    works = [thread.begin(job, GroupWork(call, [], 0.2)) for call in ("all_reduce", "barrier")]
    longer = thread.begin(job, GroupWork("gather", [], 60.0))
    for call, work in zip(("all_reduce", "barrier"), works, strict=True):
        with pytest.raises(RuntimeError, match=f"{call} did not end within its timeout of 0.2 s"):
            work.get_future().wait()
        with pytest.raises(Exception, match=f"{call} did not end within its timeout"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
    assert 0.2 <= time.monotonic() - begun_s < 30
    assert not longer.is_completed()
    comes.set()
    longer.get_future().wait()
    assert longer.is_success()
    assert not works[0].is_success(), "it stays as it was said"
    assert thread.close(5.0)


def test_a_collective_that_took_too_long_says_that_its_tensors_may_change() -> None:
    thread, comes, tensor = WorkThread("test"), threading.Event(), torch.zeros(2)

    def job() -> int:
        assert comes.wait(60)
        tensor[:] = 1
        return -1

    work = thread.begin(job, GroupWork("all_reduce", [tensor], 0.1))
    with pytest.raises(Exception, match="its tensors may still change, when that rank calls it late"):
        work.wait()
    assert tensor.tolist() == [0, 0]
    comes.set()
    assert thread.close(60.0)
    assert tensor.tolist() == [1, 1]


def test_a_work_is_over_when_its_future_is_done() -> None:
    """As with Gloo: the reducer of DDP waits for a work, and then takes the value of its future."""
    completed = []

    class Seen(GroupWork):
        """Notes whether it is over while the future takes its value."""

        def _value(self, settled: Any) -> list[Any]:
            completed.append(self.is_completed())
            return super()._value(settled)

    class Told(threading.Event):
        """Notes whether the work is over when those who wait are told."""

        def set(self) -> None:
            completed.append(work.is_completed())
            super().set()

    thread, work = WorkThread("test"), Seen("all_reduce", [torch.ones(1)], 60.0)
    work._over = Told()
    thread.begin(lambda: -1, work)
    waits = work.get_future().then(lambda _: work.wait())  # in a callback of the future, too
    assert work.wait()
    assert work.get_future().done()
    assert waits.wait()
    assert completed == [False, True]
    assert thread.close(60.0)


def test_what_begins_while_the_group_ends_is_over() -> None:
    """DDP begins buckets in autograd's threads, while another thread may abort the group."""
    thread = WorkThread("test")
    put = thread._todo.put

    class Late:
        """A queue into which nothing comes before the end."""

        def put(self, item: Any) -> None:
            if item is not None:
                thread.close()
            put(item)

        get = thread._todo.get

    thread._todo = Late()
    work = thread.begin(lambda: -1, GroupWork("all_reduce", [], 60.0))
    with pytest.raises(UsageError, match="the process group was destroyed"):
        work.wait()
    with pytest.raises(RuntimeError, match="the process group was destroyed"):
        work.get_future().wait()


class Begun:
    """A messenger whose messages never come by themselves."""

    def __init__(self) -> None:
        self.futures: list[Future[int]] = []

    def begin_recv(self, array: Any, source: int, tag: int = 0) -> Future[int]:
        self.futures.append(Future())
        return self.futures[-1]

    begin_send = begin_recv


def test_a_message_that_fails_after_the_group_has_ended_is_over() -> None:
    messenger = Begun()
    messages = Messages(messenger, 0, 60.0)
    works = [messages.recv([torch.zeros(3)], 1, 0), messages.send([torch.zeros(3)], 1, 0)]
    messages.close()
    messenger.futures[0].set_exception(ContributorLost("rank 1 is lost"))
    messenger.futures[1].set_result(1)
    with pytest.raises(ContributorLost):
        works[0].wait()
    with pytest.raises(UsageError, match="destroyed"):
        works[1].wait()


def test_a_group_without_messages_has_no_threads_for_them() -> None:
    before = threading.active_count()
    Messages(Begun(), 0, 60.0).close()
    assert threading.active_count() == before
