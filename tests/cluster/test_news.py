"""The lines in the log: which instructions give one, and how their fields are written."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bml.cluster.process.logs import log_as_asked
from bml.cluster.spec.news import line, of_coordinator, of_server
from bml.errors import Evicted, UsageError
from bml.protocol.server import events as ev
from bml.protocol.wire import messages as msg

VIEW = msg.View(
    3, (0, 1), ("server:2",), 7, "server 2 is dead", 0.5, learners=(1,), rates=(msg.Rate(0, 1, 2, 1),)
)


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"a": 1, "b": (1, 2), "c": ()}, "it a=1 b=1,2 c=-"),
        ({"why": 'he said "no"'}, 'it why="he said \\"no\\""'),
        ({"why": "two\nlines", "none": ""}, 'it why="two\\nlines" none=""'),
        ({"x": "a=b"}, 'it x="a=b"'),
    ],
)
def test_fields_are_keys_and_values_on_one_line(fields: dict[str, Any], written: str) -> None:
    assert line("it", **fields) == written


@pytest.mark.parametrize(
    ("instruction", "says"),
    [
        (
            ev.Installed(VIEW),
            "view-installed server=0 epoch=3 members=0,1 commit=7 learners=1 failures=server:2 slow=0/1 "
            'reason="server 2 is dead"',
        ),
        (
            ev.Tell(msg.Suspect(0, 1, 0, "silence", 0.51234, "heard nothing")),
            'suspicion server=0 peer=1 level=0 kind=silence silent_s=0.512 why="heard nothing"',
        ),
        (ev.Tell(msg.Withdraw(0, 1, 0)), "suspicion-withdrawn server=0 peer=1 level=0"),
        (ev.Stop(Evicted("out of view 3")), 'stopped server=0 kind=Evicted error="out of view 3"'),
        (ev.Tell(msg.Leaves(0, "SIGTERM")), "leaves server=0 why=SIGTERM"),
        (ev.Tell(msg.CaughtUp(0, 4)), "caught-up server=0 epoch=4"),
        (ev.Tell(msg.Progress(0, 9)), ""),
    ],
)
def test_what_a_server_does(instruction: Any, says: str) -> None:
    assert of_server(0, instruction) == says


def test_what_a_coordinator_asks() -> None:
    freeze = of_coordinator(1, 0, msg.Freeze(1, 3, "server 2 is dead"))
    assert freeze == 'diagnosis term=1 epoch=3 reason="server 2 is dead"'
    assert of_coordinator(1, 2, msg.Evict(1, 3, "silent")) == "eviction term=1 epoch=3 server=2 reason=silent"
    assert of_coordinator(1, 0, msg.Install(1, 3)) == ""


@pytest.fixture
def level() -> Iterator[logging.Logger]:
    logger = logging.getLogger("bml")
    before = logger.level
    yield logger
    logger.setLevel(before)


def test_the_level_is_that_of_the_environment(level: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BML_LOG", "info")
    log_as_asked()
    assert level.level == logging.INFO
    monkeypatch.setenv("BML_LOG", "loud")
    with pytest.raises(UsageError, match="BML_LOG is 'loud'"):
        log_as_asked()


@pytest.mark.real
@pytest.mark.timeout(90)
def test_a_job_says_what_happens_and_nothing_per_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BML_LOG", "INFO")
    script = tmp_path / "train.py"
    script.write_text(
        "def train(session):\n    for _ in session.steps(40):\n        session.allreduce([1.0])\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "bml", "run", str(script), "--fabric", "switch:3", "--launcher", "processes",
         "--transport", "tcp", "--fault", "kill:2@step=9"],
        capture_output=True, text=True, timeout=80, check=True,
    )  # fmt: skip
    said = run.stdout + run.stderr
    for name in (
        "transport server=0 name=tcp",
        "diagnosis term=",
        "view-installed server=1 epoch=1 members=0,1,2",
    ):
        assert name in said, said
    assert "suspicion server=" in said
    assert len([each for each in said.splitlines() if " INFO bml." in each]) < 60
