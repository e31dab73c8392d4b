"""A Ray that is started for a job lets in nobody without the token of that Ray, and nobody else learns it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest

from bml.cluster.emulated import ray_nodes
from bml.cluster.emulated.ray_nodes import EmulatedRayFleet
from bml.cluster.ray import auth as ray_auth
from bml.cluster.spec.job import JobSpec, Place
from bml.errors import StartError

JOB = """
import json, os, subprocess, sys
import bml, numpy as np, psutil, ray
from bml.cluster.ray import auth as ray_auth
from ray._raylet import AuthenticationTokenLoader, get_authentication_mode


def train(session):
    return float(session.allreduce(np.ones(3))[0])


def shows(process):
    try:
        return token in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # Ray ends workers that it does not need
        return False


with bml.start(train, "bcube:2x1") as job:
    address = ray.get_runtime_context().gcs_address
    family = psutil.Process().children(recursive=True)
    raylet = next(each for each in family if each.name() == "raylet")
    token = raylet.environ().get("RAY_AUTH_TOKEN", "no token at all")
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    stranger = subprocess.run(
        [sys.executable, "-c", ray_auth._PROBE, address],
        env={**os.environ, **wrong}, capture_output=True, text=True,
    )
    found = {
        "stranger": ray_auth.exposure(address),
        "guesser": stranger.stdout.strip(),
        "known": token in os.environ.values(),
        "shown": [each.pid for each in family if shows(each)],
        "files": subprocess.run(
            ["grep", "-rl", token, os.environ["TMPDIR"]], capture_output=True, text=True
        ).stdout,
        "values": job.wait(60).values,
    }
found["mode"] = get_authentication_mode()
found["left"] = AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
print(json.dumps(found))
"""


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_ray_of_our_own_lets_in_nobody_without_its_token(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # for what Ray leaves, with a short name
        environment = {**os.environ, "TMPDIR": folder, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
        for name in ray_auth.SETTINGS:
            environment.pop(name, None)
        command = [sys.executable, str(tmp_path / "job.py")]
        with commands.begun(*command, cwd=tmp_path, env=environment) as process:
            stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stdout + stderr
    found = json.loads(stdout.splitlines()[-1])
    assert found["stranger"][0], found
    assert "asks for its token" in found["stranger"][1]
    assert found["guesser"] == "authenticated", "a wrong token is refused too"
    assert found["values"] == {"0": 2.0, "1": 2.0}
    assert not found["known"], "what is started beside the job does not know it"
    assert found["shown"] == []
    assert found["files"] == ""
    assert found["mode"] == 0, "the next cluster of this process is the user's own matter"
    assert not found["left"]
    assert not (tmp_path / ".ray").exists(), "nor is a token left in the home of the user"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, True),
        ({"RAY_AUTH_MODE": ""}, True),
        ({"RAY_AUTH_MODE": "token"}, False),
        ({"RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_AUTH_TOKEN": "mine"}, False),
        ({"RAY_AUTH_TOKEN_PATH": "/mine"}, False),
    ],
)
def test_a_token_of_its_own_unless_the_user_has_said_otherwise(
    said: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ray_auth.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    one, other = (ray_auth.own_settings(os.environ) for _ in range(2))
    if not expected:
        assert one == other == {}
    else:
        assert one["RAY_AUTH_MODE"] == "token"
        assert len(one["RAY_AUTH_TOKEN"]) == 64
        assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    before = dict(os.environ)
    monkeypatch.setattr(ray_auth, "forget", lambda: None)
    with suppress(StartError), ray_auth.private():
        assert ("RAY_AUTH_TOKEN" in os.environ) is (expected or "RAY_AUTH_TOKEN" in said)
        raise StartError("Ray does not start")
    assert dict(os.environ) == before


def test_machines_of_an_emulated_fabric_have_one_token_and_no_argument_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ray_auth.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    started: list[tuple[list[str], dict[str, str]]] = []
    machines = SimpleNamespace(
        start=lambda machine, space, command, environment, logged: started.append((command, environment))
    )
    spec, place = JobSpec("bcube:2x1", emulated="bml"), Place(namespace="/run/netns/x")
    fleets = [
        EmulatedRayFleet(spec, False, lambda server: place, lambda *_: None, lambda text: None)
        for _ in range(2)
    ]
    for fleet in (fleets[0], *fleets):
        monkeypatch.setattr(fleet, "_machines", machines)
        fleet._start_node(1)
    commands, environments = zip(*started, strict=True)
    tokens = [environment["RAY_AUTH_TOKEN"] for environment in environments]
    assert tokens[0] == tokens[1] != tokens[2]
    assert {environment["RAY_AUTH_MODE"] for environment in environments} == {"token"}
    assert not any(token in word for command in commands for word in command for token in tokens)


def test_nothing_switches_authentication_off() -> None:
    root = Path(ray_nodes.__file__).parents[3]
    files = {root / "Makefile", *root.glob("bml/cluster/**/*.py")} - {Path(ray_auth.__file__)}
    assert not [path for path in files if "RAY_AUTH" in path.read_text()]
