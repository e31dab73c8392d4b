"""Both launchers come to the same end with the same function, however bad it is: see bad_functions."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import bad_functions
import commands
import pytest

LAUNCHERS = [
    pytest.param("processes", marks=[pytest.mark.real, pytest.mark.timeout(120)]),
    pytest.param(
        "ray", marks=[pytest.mark.ray, pytest.mark.few(6), pytest.mark.timeout(400)]
    ),  # some seconds each
]
Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=LAUNCHERS)
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """What came of every function that a chosen test is about."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and item.callspec.params["outcomes"] == request.param
    ]
    program = [sys.executable, str(Path(bad_functions.__file__)), request.param, *names]
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="r-") as folder:  # for what Ray leaves, with a short name
        with commands.begun(*program, env={**os.environ, "TMPDIR": folder}) as process:
            stdout, stderr = process.communicate()
        assert process.returncode == 0, stdout + stderr
        assert commands.left_of(folder) == []
        files = [path for path in Path(folder).rglob("*") if not path.is_dir()]
        assert request.param == "ray" or files == []
    assert set(os.listdir("/dev/shm")) == shared
    (line,) = [each for each in stdout.splitlines() if each.startswith("{")]  # Ray makes remarks beside it
    found: Outcomes = json.loads(line)
    return found


@pytest.mark.parametrize("name", bad_functions.TABLE)
def test_a_bad_function_has_one_outcome(name: str, outcomes: Outcomes) -> None:
    wanted, found = bad_functions.TABLE[name], outcomes[name]
    if wanted.error:
        assert re.match(wanted.error, found["error"]), found
        return
    assert found["error"] == ""
    assert tuple(found["dead"]) == wanted.dead
    assert len(found["values"]) == len(wanted.values)
    for value, begins in zip(found["values"], wanted.values, strict=True):
        assert value.startswith(begins)
