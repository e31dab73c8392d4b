"""What `bml doctor` names is there: modules, extras, commands and files; and what it says of Ray."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bml.cli import main
from bml.cluster.launcher.launch import LAUNCHERS
from bml.lab.bench.contenders import PEERS
from bml.protocol.timeouts import Timeouts
from bml.transport.choice import AUTO, TRANSPORTS

doctor = importlib.import_module("bml.cli.doctor")  # the package has the command by that name

ROOT = Path(doctor.__file__).parents[2]
SOURCE = Path(doctor.__file__).read_text()
TEXTS = [
    node.value
    for node in ast.walk(ast.parse(SOURCE))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]
SAID = "\n".join([*TEXTS, *(f"{check.what} {check.why}" for check in doctor.checks_of_this_machine())])


def test_every_module_that_is_named_can_be_imported() -> None:
    named = set(re.findall(r"\bbml(?:\.[a-z_]+)+", SAID))
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def test_every_extra_that_is_named_is_one() -> None:
    named = set(re.findall(r"\bbml\[([a-z]+)\]", SAID))
    assert named >= {"torch", "rdma"}
    assert named <= set(importlib.metadata.metadata("bml").get_all("Provides-Extra") or ())


def test_every_command_and_file_that_is_named_is_there() -> None:
    commands = set(re.findall(r"\bbml ([a-z]+)", SAID)) - {"doctor"}
    assert commands >= {"status", "inject", "fabric", "bench"}
    assert commands <= set(main.commands)
    files = re.findall(r"\b(?:examples|docs)/[\w./-]+\.\w+", SAID)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_option_and_subcommand_that_is_named_is_there() -> None:
    known = {option for command in every(main) for each in command.params for option in each.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", SAID))
    assert named >= {"--transport", "--json"}
    assert named <= known
    for group, below in re.findall(r"\bbml (fabric|bench) ([a-z-]+)", SAID):
        assert below in main.commands[group].commands or below in ("of", "and")  # type: ignore[attr-defined]


def every(command: click.Command) -> Iterator[click.Command]:
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from every(below)


def test_every_variable_that_is_named_is_in_the_reference() -> None:
    reference = (ROOT / "docs/reference/environment.md").read_text()
    named = set(re.findall(r"\b(?:BML|RAY|OMP|XDG)_[A-Z_]*[A-Z]\b", SAID))
    assert named >= {"BML_NICS", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    assert [name for name in named if f"`{name}`" not in reference] == []


def test_every_time_out_is_explained_by_time_outs_that_exist() -> None:
    fields = {each.name for each in dataclasses.fields(Timeouts)}
    assert set(doctor._MEANING) == fields
    assert set(re.findall(r"\b[a-z_]+_s\b", " ".join(doctor._MEANING.values()))) <= fields


def test_every_transport_launcher_and_peer_that_is_named_is_one() -> None:
    for word, known in (("transport", (*TRANSPORTS, AUTO)), ("launcher", LAUNCHERS), ("peer", PEERS)):
        named = set(re.findall(rf"\bthe {word} ([a-z]+)|--{word} ([a-z,]+)|: {word} ([a-z]+)", SAID))
        found = {each for groups in named for each in groups if each}
        assert found, word
        assert found <= set(known), word


def said(monkeypatch: pytest.MonkeyPatch, **settings: str) -> tuple[bool, str]:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    check = doctor._ray_authentication()
    return check.usable, check.why


def test_who_gets_into_a_ray_that_is_started_for_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    usable, why = said(monkeypatch)
    assert usable
    assert "a token of its own" in why
    assert said(monkeypatch, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="x") == (
        True,
        "a Ray that is started for a job has the token that RAY_AUTH_TOKEN gives",
    )
    usable, why = said(monkeypatch, RAY_AUTH_MODE="disabled")
    assert not usable
    assert "everyone who reaches this machine" in why


def test_a_cluster_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not known" in said(monkeypatch, RAY_ADDRESS="auto")[1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "127.0.0.1:none"):
        usable, why = said(monkeypatch, RAY_ADDRESS=address)
        assert not usable
        assert "cannot be asked" in why


@pytest.mark.parametrize(
    ("printed", "usable", "words"),
    [("authenticated", True, "its token"), ("open", False, "everyone"), ("", False, "does not answer")],
)
def test_a_cluster_that_is_asked_without_a_token(
    monkeypatch: pytest.MonkeyPatch, printed: str, usable: bool, words: str
) -> None:
    from bml.cluster.ray import auth as ray_auth

    monkeypatch.setattr(ray_auth, "_PROBE", f"import os; print({printed!r} if {asked()} else 'wrong')")
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        found = said(monkeypatch, RAY_ADDRESS=address, RAY_AUTH_TOKEN="the user's")
    assert found[0] is usable
    assert words in found[1]


def asked() -> str:
    """It is asked without the user's token, as a stranger would."""
    return "os.environ.get('RAY_AUTH_MODE') == 'disabled' and 'RAY_AUTH_TOKEN' not in os.environ"
