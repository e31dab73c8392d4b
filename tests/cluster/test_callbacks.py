"""What users hear of a job that they gave no function to hear it with."""

from __future__ import annotations

import logging
import os
import re

import pytest

from bml.cluster import ray as on_ray
from bml.cluster.launcher.callbacks import log_views


def test_every_view_after_the_first_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    changed = log_views()
    with caplog.at_level(logging.WARNING, "bml.cluster"):
        for epoch, step in [(0, 0), (1, 0), (1, 5), (2, 6), (2, 7), (4, 8)]:
            changed({"epoch": epoch, "step": step, "members": [0, 2], "reason": "server 1 is dead"})
    assert caplog.messages == [
        "view 2: 2 servers (server 1 is dead)",
        "view 4: 2 servers (server 1 is dead)",
    ]


def test_ray_hides_what_it_says_of_dead_workers_and_nothing_stays_in_the_environment() -> None:
    died = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    assert re.search(on_ray.HIDDEN, died)
    assert not re.search(on_ray.HIDDEN, f"my own print: {died}")
    assert "RAY_DEDUP_LOGS_SKIP_REGEX" not in os.environ
