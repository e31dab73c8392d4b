"""The thread of a process group: limits of time, for those that wait for futures, too."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

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
    assert 0.2 <= time.monotonic() - begun_s < 5
    assert not longer.is_completed()
    comes.set()
    longer.get_future().wait()
    assert longer.is_success()
    assert not works[0].is_success(), "it stays as it was said"
    assert thread.close(5.0)
