"""A process that stops itself for a while is woken, and what is to wake it does not outlive it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)

STOPS = "import sys; from bml.cluster.injection.freezing import stop_this_process; "
WITHIN_S = 20.0


@contextmanager
def stopping(duration_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process that stops itself for so long, and says then how long it was."""
    code = f"{STOPS} import time; t = time.monotonic(); stop_this_process({duration_s})"
    say = "print(time.monotonic() - t)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", f"{code}; {say}"], stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("duration_s", [0.0001, 0.3])
def test_it_wakes_when_the_time_is_over(duration_s: float) -> None:
    with stopping(duration_s) as process:
        stopped_s = float(process.communicate(timeout=WITHIN_S)[0])
    assert duration_s <= stopped_s < WITHIN_S


@pytest.mark.slow
def test_what_is_to_wake_it_ends_with_it_and_holds_nothing_of_it() -> None:
    with stopping(600.0) as process:
        until = time.monotonic() + WITHIN_S
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until
            time.sleep(0.01)
        (waker,) = psutil.Process(process.pid).children()
        process.kill()
        assert process.communicate(timeout=WITHIN_S)[0] == "", "its output is closed"
        assert psutil.wait_procs([waker], timeout=WITHIN_S)[1] == []
