"""What users hear of a job that they gave no function to hear it with."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading

import pytest

from bml.cluster.launcher.callbacks import Teller, ViewLog
from bml.cluster.ray.quiet import quiet_ray


def test_every_view_after_the_first_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    changed = ViewLog()
    with caplog.at_level(logging.WARNING, "bml.cluster"):
        for epoch, step in [(0, 0), (1, 0), (1, 5), (2, 6), (2, 7), (4, 8)]:
            changed({"epoch": epoch, "step": step, "members": [0, 2], "reason": "server 1 is dead"})
    assert caplog.messages == [
        "view 2: 2 servers (server 1 is dead)",
        "view 4: 2 servers (server 1 is dead)",
    ]


def test_ray_hides_what_it_says_of_dead_workers_and_nothing_stays_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_DEDUP_LOGS_SKIP_REGEX", raising=False)
    died = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    with quiet_ray():
        hidden = os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"]
    assert "RAY_DEDUP_LOGS_SKIP_REGEX" not in os.environ
    assert re.search(hidden, died)
    assert not re.search(hidden, f"my own print: {died}")


def test_what_the_user_hides_of_ray_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_DEDUP_LOGS_SKIP_REGEX", "mine")
    with quiet_ray():
        assert os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] == "mine"
    assert os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] == "mine"


def test_no_thread_is_left_of_callbacks_that_are_closed() -> None:
    heard: list[str] = []
    teller = Teller(None)
    teller.say(heard.append, "a view")
    teller.drain(10.0)
    teller.close(10.0)
    assert heard == ["a view"]
    assert not [thread for thread in threading.enumerate() if thread.name == "bml-teller"]
    teller.close(10.0)


SNAPSHOT = {"term": 1, "epoch": 2, "step": 6, "members": [0, 2], "reason": "server 1 is dead"}


def test_an_error_of_a_users_logging_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    def raises(record: logging.LogRecord) -> bool:
        raise KeyError("request_id")

    logger = logging.getLogger("bml.cluster.launcher.callbacks")
    logger.addFilter(raises)
    try:
        ViewLog()(SNAPSHOT)
    finally:
        logger.removeFilter(raises)


FULL = """
import fcntl, os, threading
read, write = os.pipe()
os.set_blocking(write, False)
try:
    while True:
        os.write(write, bytes(4096))
except BlockingIOError:
    os.set_blocking(write, True)
os.dup2(write, 2)
from bml.cluster.launcher.callbacks import Teller
teller = Teller(None)
teller.tell({"term": 1, "epoch": 2, "step": 6, "members": [0, 2], "reason": "server 1 is dead"})
teller.drain(20.0)
teller.close(20.0)
assert not [thread for thread in threading.enumerate() if thread.name == "bml-teller"]
print("over")
"""


def test_a_reader_that_does_not_read_keeps_no_process_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], stdout=subprocess.PIPE, timeout=30, text=True)
    assert (done.returncode, done.stdout) == (0, "over\n")
